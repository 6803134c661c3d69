"""From granted rows to their outcomes: pack, run the model, decide; and what to do when the model fails."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.core.engine.batcher import Batcher
from mvllm.core.engine.decisions import RowOutcome, decide, failed
from mvllm.core.engine.request_table import RequestState
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.step import KvGrant, PlannedRow, StepPlan
from mvllm.core.tensor import Model


class ForwardRunner:
    """Runs the rows of a step. Owns the batcher; changes KV grants only to take them back or renew them."""

    def __init__(self, model: Model, kv: KvManager, batcher: Batcher) -> None:
        self._model = model
        self._kv = kv
        self._batcher = batcher

    def run(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant
    ) -> tuple[list[RowOutcome], Exception | None]:
        """Compute the rows together. If that fails, each is run alone, once (INVARIANTS L6).

        Returns:
            One outcome per row; and the last error if every row failed alone too, else None.
        """
        if not rows:
            return [], None
        try:
            return self._forward(rows, states, grant), None
        except Exception:
            return self._run_singly(rows, states)

    def _run_singly(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState]
    ) -> tuple[list[RowOutcome], Exception | None]:
        outcomes: list[RowOutcome] = []
        errors: list[Exception] = []
        for row, state in zip(rows, states, strict=True):
            # What all rows were granted together fits when they come one by one.
            grant = self._kv.grant(StepPlan(rows=(row,)), {})
            try:
                outcomes += self._forward([row], [state], grant)
            except Exception as error:
                outcomes.append(failed(row, f"the model failed: {type(error).__name__}: {error}"))
                errors.append(error)
        return outcomes, errors[-1] if len(errors) == len(rows) else None

    def _forward(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant
    ) -> list[RowOutcome]:
        try:
            output = self._model.step(self._batcher.pack(rows, states, grant))
        except BaseException:  # an interrupt too must leave the blocks as they were
            self._kv.rollback(grant)
            raise
        return decide(rows, states, output)
