"""From granted rows to their outcomes: pack, run the model, decide; and what to do when the model fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.batch.batcher import Batcher, BatchRow
from mvllm.core.engine.decisions import Drafts, RowOutcome, decide, failed
from mvllm.core.engine.request_table import RequestState
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.step import KvGrant, PlannedRow, StepPlan
from mvllm.core.tensor import Model
from mvllm.core.trace import Trace


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What came of the rows of a step."""

    outcomes: Sequence[RowOutcome] = ()  # one per row
    together: bool = True  # in one batch, with their drafts; else one by one, without
    error: Exception | None = None  # the last one, if every row failed alone too


class ForwardRunner:
    """Runs the rows of a step. Owns the batcher; changes KV grants only to take them back or renew them."""

    def __init__(self, model: Model, kv: KvManager, batcher: Batcher, trace: Trace) -> None:
        self._model = model
        self._kv = kv
        self._batcher = batcher
        self._trace = trace

    def run(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant, drafts: Drafts
    ) -> ForwardResult:
        """Compute the rows and their drafts together. If that fails, each row is run alone, once, without
        drafts (INVARIANTS L6)."""
        if not rows:
            return ForwardResult()
        try:
            return ForwardResult(self._forward(rows, states, grant, drafts))
        except Exception:
            outcomes, error = self._run_singly(rows, states)
            return ForwardResult(outcomes, together=False, error=error)

    def _run_singly(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState]
    ) -> tuple[list[RowOutcome], Exception | None]:
        """Outcomes, and the last error if every row failed."""
        outcomes: list[RowOutcome] = []
        errors: list[Exception] = []
        for row, state in zip(rows, states, strict=True):
            # What all rows were granted together fits when they come one by one.
            grant = self._kv.grant(StepPlan(rows=(PlannedRow(row.id, row.start, row.count),)), {})
            try:
                outcomes += self._forward([row], [state], grant, [()])
            except Exception as error:
                outcomes.append(failed(row, f"the model failed: {type(error).__name__}: {error}"))
                errors.append(error)
        return outcomes, errors[-1] if len(errors) == len(rows) else None

    def _forward(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant, drafts: Drafts
    ) -> list[RowOutcome]:
        try:
            self._trace.stage("pack")
            batch = self._batcher.pack(batch_rows(rows, states, grant, drafts))
            self._trace.stage("forward")
            output = self._model.step(batch)
        except BaseException:  # an interrupt too must leave the blocks as they were
            self._kv.rollback(grant)
            raise
        self._trace.stage("decide")
        return decide(rows, states, drafts, output)


def batch_rows(
    rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant, drafts: Drafts
) -> list[BatchRow]:
    """What the planned rows compute. A row draws a token at its last one and at each draft, and none if the
    plan stops short of its last token: there is nothing to sample in the middle of a prompt."""
    batch = []
    for row, state, row_drafts in zip(rows, states, drafts, strict=True):
        table, end, token_ids = grant.tables[row.id], row.start + row.count, state.token_ids
        if end == len(token_ids):
            num_drafts = len(row_drafts)
            batch.append(
                BatchRow(
                    row.id,
                    table,
                    token_ids,
                    row_drafts,
                    row.start,
                    end + num_drafts,
                    state.sampling,
                    1 + num_drafts,
                )
            )
        else:
            batch.append(BatchRow(row.id, table, token_ids, (), row.start, end, None, 0))
    return batch
