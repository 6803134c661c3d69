"""Planted bugs of the adaptive policy, and the check that notices each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mvllm.core.spec import acceptance, adaptive_length, step_costs
from mvllm.core.spec.draft_length import DraftDemand, DraftResult, SpeculationStep
from mvllm.core.types import RequestId
from tests.mutants.mutant import Mutant

_survival = acceptance.AcceptanceModel.survival
_curve = step_costs.ForwardCurve.seconds
_may_be_tried = adaptive_length.AdaptiveLength._may_be_tried
_observe_forward = adaptive_length.AdaptiveLength._observe_forward
_observe_opinion = adaptive_length.AdaptiveLength._observe_opinion


def _learns_no_acceptance(self: acceptance.AcceptanceModel, results: Iterable[DraftResult]) -> None:
    pass


def _forgets_that_drafts_depend_on_those_before(
    self: acceptance.AcceptanceModel, id: RequestId, length: int
) -> list[float]:
    return _survival(self, id, 1) * length


def _more_tokens_cost_nothing(self: step_costs.ForwardCurve, tokens: float) -> float:
    return self._seconds[0] if self._seconds else 0.0


def _drafting_costs_nothing(self: step_costs.DraftCosts, rows: int, place: int) -> float:
    return 0.0


def _catching_up_costs_nothing(self: step_costs.DraftCosts) -> float:
    return 0.0


def _never_tries(
    self: adaptive_length.AdaptiveLength, idle: Sequence[DraftDemand], num_rows: int, num_tokens: int
) -> dict[RequestId, int]:
    return {}


def _trials_cost_nothing(
    self: adaptive_length.AdaptiveLength, step: SpeculationStep, results: Sequence[DraftResult]
) -> None:
    self._savings = dict.fromkeys((False, True), 1e9)


def _tokens_seem_to_cost_four_times_as_much(self: step_costs.ForwardCurve, tokens: float) -> float:
    return _curve(self, 1.0 + 4.0 * (tokens - 1.0))


def _one_chance_for_both_kinds(self: adaptive_length.AdaptiveLength, demand: DraftDemand) -> list[float]:
    return self._acceptance[False].survival(demand.id, self._cap(demand))


def _copies_pay_for_trials_of_the_drafter(
    self: adaptive_length.AdaptiveLength, demand: DraftDemand, seconds: float, num_rows: int
) -> bool:
    available = max(self._savings.values()) + max(self._rows[demand.id].earned.values())
    return self._in_tokens(seconds, num_rows) <= available


def _what_is_at_hand_waits_for_the_drafter(
    self: adaptive_length.AdaptiveLength, rows: Sequence[DraftDemand], num_rows: int
) -> tuple[dict[RequestId, int], float]:
    if not self._draft.known:
        return {}, 0.0
    chances = [self._survival(demand) for demand in rows]
    return self._plan(rows, chances, num_rows, self._most_drafts(num_rows))


def _all_rows_join_at_once(
    self: adaptive_length.AdaptiveLength, rows: Sequence[DraftDemand], num_rows: int
) -> list[DraftDemand]:
    return [demand for demand in rows if demand.limit > 0]


def _plain_steps_come_rarely(self: adaptive_length.AdaptiveLength, num_rows: int, rate: float) -> bool:
    return self._since_plain.get(step_costs.row_group(num_rows), 0) >= 128


def _reads_until_the_end(self: adaptive_length.AdaptiveLength, demand: DraftDemand, num_rows: int) -> bool:
    return _may_be_tried(self, replace(demand, num_left=1 << 30), num_rows)


def _one_plain_step_counts_for_all_rows(self: adaptive_length.AdaptiveLength, step: SpeculationStep) -> None:
    _observe_forward(self, step)
    if step.num_tokens == step.num_rows:
        self._since_plain.clear()


def _savings_of_many_rows_go_to_one(
    self: adaptive_length.AdaptiveLength, result: DraftResult, tokens: float, num_rows: int
) -> None:
    self._savings[self._rows[result.id].is_at_hand] += tokens


def _what_was_never_read_costs_nothing(
    self: adaptive_length.AdaptiveLength, demand: DraftDemand, num_rows: int
) -> float:
    return self._draft.catch_up_seconds() * demand.num_behind


def _nobody_goes_on(
    self: adaptive_length.AdaptiveLength,
    chosen: dict[RequestId, int],
    rows: Sequence[DraftDemand],
    num_rows: int,
    rate: float,
) -> None:
    pass


def _going_on_is_always_believed(
    self: adaptive_length.AdaptiveLength, results: Sequence[DraftResult]
) -> None:
    _observe_opinion(self, results)
    self._later_right.value = 1.0


def _stopping_is_always_believed(
    self: adaptive_length.AdaptiveLength, results: Sequence[DraftResult]
) -> None:
    _observe_opinion(self, results)
    self._stopped_right.value = 0.0


def _what_is_at_hand_counts_as_a_pass(
    self: adaptive_length.AdaptiveLength, step: SpeculationStep, results: Sequence[DraftResult]
) -> None:
    asked = [result for result in results if self._rows[result.id].asked > 0]
    if asked:
        self._draft.add_round(len(asked), max(result.proposed for result in asked), step.draft_seconds)


MUTANTS: dict[str, Mutant] = {
    "acceptance is not learned": Mutant(
        acceptance.AcceptanceModel, "observe", _learns_no_acceptance, "model, never right"
    ),
    "every draft counts as a first one": Mutant(
        acceptance.AcceptanceModel,
        "survival",
        _forgets_that_drafts_depend_on_those_before,
        "model, often right",
    ),
    "more tokens cost nothing": Mutant(
        step_costs.ForwardCurve, "seconds", _more_tokens_cost_nothing, "every token costs"
    ),
    "tokens seem to cost four times as much": Mutant(
        step_costs.ForwardCurve,
        "seconds",
        _tokens_seem_to_cost_four_times_as_much,
        "free drafts, always right",
    ),
    "a drafter's opinion is not asked for": Mutant(
        adaptive_length.AdaptiveLength, "_let_go_on", _nobody_goes_on, "knows when to stop"
    ),
    "a drafter is always believed to be right": Mutant(
        adaptive_length.AdaptiveLength,
        "_observe_opinion",
        _going_on_is_always_believed,
        "sure of what is wrong",
    ),
    "a drafter is always believed to be wrong": Mutant(
        adaptive_length.AdaptiveLength,
        "_observe_opinion",
        _stopping_is_always_believed,
        "unsure of what is right",
    ),
    "drafting costs nothing": Mutant(
        step_costs.DraftCosts, "pass_seconds", _drafting_costs_nothing, "drafter as dear as the target"
    ),
    "catching up costs nothing": Mutant(
        step_costs.DraftCosts, "catch_up_seconds", _catching_up_costs_nothing, "catching up is dear"
    ),
    "costs of drafts are taken for known": Mutant(
        step_costs.ForwardCurve, "is_known", property(lambda self: True), "more rows"
    ),
    "it never tries again": Mutant(
        adaptive_length.AdaptiveLength, "_affordable_trial", _never_tries, "the text becomes better"
    ),
    "nothing is set aside for a new drafter": Mutant(
        adaptive_length, "FIRST_SAVINGS", 0.0, "reads first, begins badly"
    ),
    "one chance for what is at hand and what is not": Mutant(
        adaptive_length.AdaptiveLength, "_survival", _one_chance_for_both_kinds, "copied in vain"
    ),
    "copies pay for trials of the drafter": Mutant(
        adaptive_length.AdaptiveLength, "_is_affordable", _copies_pay_for_trials_of_the_drafter, "at hand"
    ),
    "what is at hand waits for the drafter": Mutant(
        adaptive_length.AdaptiveLength, "_best_of", _what_is_at_hand_waits_for_the_drafter, "at hand"
    ),
    "what is at hand counts as a pass": Mutant(
        adaptive_length.AdaptiveLength,
        "_observe_drafts",
        _what_is_at_hand_counts_as_a_pass,
        "cost of what is worked out",
    ),
    "one step without drafts is enough": Mutant(adaptive_length, "PLAIN_FIRST", 1, "slow at first"),
    "steps without drafts come rarely": Mutant(
        adaptive_length.AdaptiveLength, "_is_plain_due", _plain_steps_come_rarely, "little gain"
    ),
    "drafts may bring as little as steps without": Mutant(
        adaptive_length, "LEAST_RETURN", 1.0, "next to nothing"
    ),
    "it reads until the end": Mutant(
        adaptive_length.AdaptiveLength, "_may_be_tried", _reads_until_the_end, "about to end"
    ),
    "it reads at once": Mutant(adaptive_length, "TRIAL_AFTER", 0, "new drafter"),
    "one step without drafts counts for all numbers of rows": Mutant(
        adaptive_length.AdaptiveLength, "_observe_forward", _one_plain_step_counts_for_all_rows, "groups"
    ),
    "savings of many rows go to one": Mutant(
        adaptive_length.AdaptiveLength, "_save", _savings_of_many_rows_go_to_one, "after a batch"
    ),
    "what was never read costs nothing": Mutant(
        adaptive_length.AdaptiveLength,
        "_reading_seconds",
        _what_was_never_read_costs_nothing,
        "short before long",
    ),
    "all rows join at once": Mutant(
        adaptive_length.AdaptiveLength, "_admit", _all_rows_join_at_once, "one after the other"
    ),
    "reading seems to cost nothing at first": Mutant(
        adaptive_length, "GUESSED_CATCH_UP", 0.0, "many rows wait"
    ),
    "trials cost nothing": Mutant(
        adaptive_length.AdaptiveLength, "_account", _trials_cost_nothing, "model, never right"
    ),
}
