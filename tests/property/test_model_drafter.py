"""The model drafter over random lives of rows (INVARIANTS V4, V6; K1, K3 to K5, K9, L4, T11)."""

from __future__ import annotations

from hypothesis import settings

from tests.models.drafter_machine import ModelDrafterMachine


class RoomyModelDrafterMachine(ModelDrafterMachine):
    roomy = True


# Every draft is checked against whole token lists, so one life takes as long as several of a KV manager.
FEWER = settings(max_examples=max(10, settings.default.max_examples // 4), stateful_step_count=20)

TestModelDrafter = ModelDrafterMachine.TestCase
TestModelDrafter.settings = FEWER
TestModelDrafterWithRoomForAll = RoomyModelDrafterMachine.TestCase
TestModelDrafterWithRoomForAll.settings = FEWER
