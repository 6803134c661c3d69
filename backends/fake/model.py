"""A model without floats. Any error in paging, sharing, truncation or preemption changes its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.fake.tags import ROOT_TAG, FakeSampling, choose, extend_tag, logits_of
from mvllm.core.errors import EngineClosed
from mvllm.core.step import NO_VOCAB_LIMIT, ForwardBatch, RowStatus, SamplingArrays, StepOutput
from mvllm.core.tensor import Model
from mvllm.core.types import BlockId, TokenId

_TAG_PARTS = 4  # a 64-bit tag as four 16-bit numbers, which float32 holds exactly


class InjectedFault(RuntimeError):
    """The failure that a test asked for."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose."""

    nan_tokens: frozenset[TokenId] = frozenset()  # a row that samples after one of them gets status NAN
    crash_tokens: frozenset[TokenId] = frozenset()  # a batch that contains one of them raises
    crash_if: Callable[[ForwardBatch], bool] = lambda batch: False


@dataclass(frozen=True)
class _Entry:
    """What a slot of the KV pool holds."""

    tag: int
    position: int
    token: TokenId


class FakeModel(Model):
    """Owns a pool of tags; `violations` records every access that no correct engine makes.

    Slot i of the pool holds the tag of the prefix that ends there, computed from the tag before it, which is
    read through the block table like keys and values would be.
    """

    def __init__(
        self, vocab_size: int, num_blocks: int, block_size: int, *, faults: Faults | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.faults = faults or Faults()
        self.violations: list[str] = []
        self.num_steps = 0
        self._pool: list[_Entry | None] = [None] * (num_blocks * block_size)
        self._closed = False

    def step(self, batch: ForwardBatch) -> StepOutput:
        """
        Raises:
            InjectedFault: as `faults` has it; nothing was written.
            EngineClosed: the model is closed.
        """
        tags = self._run(batch)
        last_tokens = batch.tokens[batch.logit_rows].tolist()
        return self._sample(tags, last_tokens, batch.sampling, batch.vocab_limit)

    def logits(self, batch: ForwardBatch) -> NDArray[np.float32]:
        tags = self._run(batch)
        rows = [logits_of(tag, self.vocab_size) for tag in tags]
        logits = np.array(rows, np.float32).reshape(-1, self.vocab_size)
        logits[:, batch.vocab_limit :] = -np.inf
        return logits

    def taps(self, batch: ForwardBatch) -> list[NDArray[np.float32]]:
        """One layer: the parts of each token's tag, f32[T, 4]."""
        self._run(batch)
        entries = [self._pool[slot] for slot in batch.slots.tolist()]
        return [np.array([_parts(entry.tag) for entry in entries if entry], np.float32)]

    def tag_at(self, slot: int) -> int | None:
        """Tag in a slot of the pool; None if it was never written."""
        entry = self._pool[slot]
        return None if entry is None else entry.tag

    def read_blocks(self, ids: Sequence[BlockId]) -> NDArray[np.float32]:
        """f32[len(ids), 1, 2, block_size, 1, 4]: k is the tag, v is (position, token, written, 0)."""
        kv = np.zeros((len(ids), 1, 2, self.block_size, 1, _TAG_PARTS), np.float32)
        for index, block_id in enumerate(ids):
            for offset in range(self.block_size):
                if entry := self._pool[block_id * self.block_size + offset]:
                    kv[index, 0, 0, offset, 0] = _parts(entry.tag)
                    kv[index, 0, 1, offset, 0] = (entry.position, entry.token, 1, 0)
        return kv

    def write_blocks(self, ids: Sequence[BlockId], kv: NDArray[np.float32]) -> None:
        for index, block_id in enumerate(ids):
            for offset in range(self.block_size):
                position, token, written, _ = kv[index, 0, 1, offset, 0].astype(int).tolist()
                parts = kv[index, 0, 0, offset, 0].astype(int).tolist()
                tag = sum(part << (16 * place) for place, part in enumerate(parts))
                entry = _Entry(tag, position, token) if written else None
                self._pool[block_id * self.block_size + offset] = entry

    def describe(self) -> str:
        return "fake: tags instead of keys and values, hashes instead of logits"

    @property
    def weight_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True

    # --- the pass ----------------------------------------------------------------------------------------

    def _run(self, batch: ForwardBatch) -> list[int]:
        """Write the batch's tags; returns those of its logit rows."""
        if self._closed:
            raise EngineClosed("the model is closed")
        self.num_steps += 1
        if self.faults.crash_if(batch) or not self.faults.crash_tokens.isdisjoint(batch.tokens.tolist()):
            raise InjectedFault("a batch that was made to fail")
        slots = batch.slots.tolist()
        if len(set(slots)) != len(slots):
            self._violation(f"a slot is written twice in one step: {slots}")
        tags: list[int] = []
        written: dict[int, _Entry] = {}  # applied at the end: no row sees what another writes (K2)
        for row in range(batch.num_rows):
            tags += self._run_row(batch, row, written)
        for slot, entry in written.items():
            self._pool[slot] = entry
        return [tags[index] for index in batch.logit_rows.tolist()]

    def _run_row(self, batch: ForwardBatch, row: int, written: dict[int, _Entry]) -> list[int]:
        start, end = batch.row_starts[row : row + 2].tolist()
        tokens, positions = batch.tokens[start:end].tolist(), batch.positions[start:end].tolist()
        slots, table = batch.slots[start:end].tolist(), batch.block_tables[row].tolist()
        first = positions[0]
        if (
            positions != list(range(first, first + len(tokens)))
            or batch.context_lens[row] != positions[-1] + 1
        ):
            self._violation(f"positions {positions}, context length {batch.context_lens[row]}")
        tag = self._context_tag(table, first, row)
        tags = []
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            if slot != self._slot(table, position):
                self._violation(f"position {position} goes to slot {slot}, its table is {table}")
            tag = extend_tag(tag, token)
            written[slot] = _Entry(tag, position, token)
            tags.append(tag)
        return tags

    def _context_tag(self, table: Sequence[int], length: int, row: int) -> int:
        """Tag of the context [0, length), read through the table.

        Attention would read every position, so every one is checked.
        """
        tag = ROOT_TAG
        for position in range(length):
            entry = self._pool[self._slot(table, position)]
            if entry is None or entry.position != position or entry.tag != extend_tag(tag, entry.token):
                self._violation(f"row {row} reads {entry} at position {position} of table {table}")
            tag = entry.tag if entry else extend_tag(tag, 0)
        return tag

    def _slot(self, table: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        if block >= len(table) or table[block] < 0:
            self._violation(f"position {position} is outside of table {table}")
            return offset
        return table[block] * self.block_size + offset

    def _violation(self, what: str) -> None:
        self.violations.append(f"step {self.num_steps}: {what}")

    # --- sampling ----------------------------------------------------------------------------------------

    def _sample(
        self,
        tags: Sequence[int],
        last_tokens: Sequence[TokenId],
        sampling: SamplingArrays,
        vocab_limit: int,
    ) -> StepOutput:
        size = len(tags)
        width = max([0, *sampling.num_logprobs.tolist()])
        tokens, status, rank = (np.zeros(size, np.int32) for _ in range(3))
        logprob, target_logprob = (np.zeros(size, np.float32) for _ in range(2))
        top_tokens = np.full((size, width), -1, np.int32)
        top_logprobs = np.zeros((size, width), np.float32)
        for row, (tag, last) in enumerate(zip(tags, last_tokens, strict=True)):
            if last in self.faults.nan_tokens:
                status[row] = RowStatus.NAN
                continue
            token = choose(tag, self.vocab_size, unpack_sampling(sampling, row), vocab_limit)
            if token is None:
                status[row] = RowStatus.EMPTY
                continue
            tokens[row] = token
            count = int(sampling.num_logprobs[row])
            if count >= 0:
                logprobs = logprobs_of(tag, self.vocab_size, vocab_limit)
                order = np.argsort(-logprobs, kind="stable")
                logprob[row] = logprobs[token]
                rank[row] = 1 + int(np.flatnonzero(order == token)[0])
                shown = order[:count]
                top_tokens[row, : len(shown)] = shown
                top_logprobs[row, : len(shown)] = logprobs[shown]
        return StepOutput(tokens, status, logprob, rank, target_logprob, top_tokens, top_logprobs)


def logprobs_of(tag: int, vocab_size: int, vocab_limit: int = NO_VOCAB_LIMIT) -> NDArray[np.float32]:
    """f32[vocab_size]: natural-log probabilities after a prefix, untouched by sampling parameters."""
    logits = logits_of(tag, vocab_size).astype(np.float64)
    logits[vocab_limit:] = -np.inf
    logprobs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return logprobs.astype(np.float32)


def unpack_sampling(arrays: SamplingArrays, row: int) -> FakeSampling:
    """The sampling parameters of one logit row, out of the arrays."""
    counts = slice(*arrays.count_offsets[row : row + 2].tolist())
    biases = slice(*arrays.bias_offsets[row : row + 2].tolist())
    seen = arrays.count_tokens[counts].tolist()
    return FakeSampling(
        position=int(arrays.position[row]),
        seed=int(arrays.seed[row]),
        temperature=float(arrays.temperature[row]),
        filters=(int(arrays.top_k[row]), float(arrays.top_p[row]), float(arrays.min_p[row])),
        repetition_penalty=float(arrays.repetition_penalty[row]),
        presence_penalty=float(arrays.presence_penalty[row]),
        frequency_penalty=float(arrays.frequency_penalty[row]),
        prompt_counts=dict(zip(seen, arrays.prompt_counts[counts].tolist(), strict=True)),
        output_counts=dict(zip(seen, arrays.output_counts[counts].tolist(), strict=True)),
        bias=dict(zip(arrays.bias_tokens[biases].tolist(), arrays.bias_values[biases].tolist(), strict=True)),
    )


def _parts(tag: int) -> tuple[int, ...]:
    """Four 16-bit parts of a tag, lowest first."""
    return tuple((tag >> (16 * place)) & 0xFFFF for place in range(_TAG_PARTS))
