"""Finding the most likely tokens of a row without sorting it.

Every filter keeps a prefix of one order (falling logit, rising id), so a radix selection finds its end. The
vocabulary is cut into blocks of 64 tokens, whose greatest keys (*maxima*) let most blocks be passed over.
*Candidates* are the tokens still in play, by rising id: ids, keys and weights (masses, or ones where tokens
are counted). Maxima and candidates live in a worker's scratch, whose parts `part` finds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.pointers import f32_at, i32_at, i64_at
from mvllm.backends.cpu.sampler_arithmetic import (
    INFINITY_KEY,
    MAX_INT32,
    MIN_INT32,
    MINUS_INFINITY_KEY,
    key_of,
    logit_of,
    mass,
)
from mvllm.backends.cpu.sampler_table import (
    BLOCK,
    BUCKET_BITS,
    IDS,
    KEYS,
    MAXIMA,
    NUM_BUCKETS,
    UNDECIDED,
    WEIGHTS,
)
from mvllm.core.step import RowStatus

OK, NAN, INFINITE, EMPTY = (int(status) for status in RowStatus)
_KEY_BITS = 32
_LATER_BITS = (_KEY_BITS - BUCKET_BITS) // 2  # a key is read in three rounds


@kernel("int64(int64)")
def num_blocks(vocab: Any) -> Any:
    """Blocks in the vocabulary, the last one perhaps short."""
    return (vocab + BLOCK - 1) // BLOCK


@kernel("int64(int64, int64, int64)")
def part(scratch: Any, vocab: Any, which: Any) -> Any:
    """Address of a part of the scratch, behind the buckets."""
    return scratch + 8 * NUM_BUCKETS + which * num_blocks(vocab) * BLOCK


@kernel("int64(int64, int64, int64)")
def scan(row: Any, vocab: Any, scratch: Any) -> Any:
    """Write the maxima of the row at address `row`; returns its status."""
    logits, maxima = f32_at(row), i32_at(part(scratch, vocab, MAXIMA))
    highest, lowest = MIN_INT32, MAX_INT32
    for block in range(num_blocks(vocab)):
        start = block * BLOCK
        maximum = MIN_INT32
        for i in range(min(BLOCK, vocab - start)):
            key = key_of(logits[start + i])
            maximum = max(maximum, key)
            lowest = min(lowest, key)
        maxima[block] = maximum
        highest = max(highest, maximum)
    if highest > INFINITY_KEY or lowest < MINUS_INFINITY_KEY:
        return NAN
    if highest == INFINITY_KEY:
        return INFINITE
    return EMPTY if highest == MINUS_INFINITY_KEY else OK


@kernel("int32(int64, int64)")
def greatest_key(vocab: Any, scratch: Any) -> Any:
    """The greatest key of the scanned row."""
    maxima = i32_at(part(scratch, vocab, MAXIMA))
    greatest = MIN_INT32
    for block in range(num_blocks(vocab)):
        greatest = max(greatest, maxima[block])
    return greatest


@kernel("int64(int64, int64, int64)")
def argmax(row: Any, vocab: Any, scratch: Any) -> Any:
    """The lowest id among the most likely tokens of the scanned row."""
    logits, maxima = f32_at(row), i32_at(part(scratch, vocab, MAXIMA))
    greatest = greatest_key(vocab, scratch)
    block = 0
    while maxima[block] != greatest:
        block += 1
    token = block * BLOCK
    while key_of(logits[token]) != greatest:
        token += 1
    return token


@kernel("int64(int64, int64, int64, int32, float64, float64, float64)")
def collect(
    row: Any,
    vocab: Any,
    scratch: Any,
    lowest_key: Any,
    maximum: Any,
    inverse_temperature: Any,
    lowest_scaled: Any,
) -> Any:
    """Make the tokens of the scanned row with at least `lowest_key` and `lowest_scaled` the candidates;
    returns their number.
    """
    logits, maxima = f32_at(row), i32_at(part(scratch, vocab, MAXIMA))
    ids, keys = i32_at(part(scratch, vocab, IDS)), i32_at(part(scratch, vocab, KEYS))
    count = 0
    for block in range(num_blocks(vocab)):
        key = maxima[block]
        if key < lowest_key or (logit_of(key) - maximum) * inverse_temperature < lowest_scaled:
            continue
        start = block * BLOCK
        for i in range(min(BLOCK, vocab - start)):
            key = key_of(logits[start + i])
            ids[count], keys[count] = start + i, key
            scaled = (logit_of(key) - maximum) * inverse_temperature
            count += (key >= lowest_key) & (scaled >= lowest_scaled)
    return count


@kernel("int64(int32, int64, int64)")
def digit(key: Any, shift: Any, bits: Any) -> Any:
    """`bits` bits of a key from bit `shift` up, greater for greater keys."""
    return ((np.int64(key) - MIN_INT32) >> shift) & ((1 << bits) - 1)


@kernel("int64(int64, int64, int64, int64)")
def keep_until(vocab: Any, scratch: Any, count: Any, last: Any) -> Any:
    """Keep candidate number `last` and those before it in the order of falling key and rising id; returns
    their number.
    """
    ids, keys = i32_at(part(scratch, vocab, IDS)), i32_at(part(scratch, vocab, KEYS))
    last_key = keys[last]
    kept = 0
    for i in range(count):
        key = keys[i]
        ids[kept], keys[kept] = ids[i], key
        kept += (key > last_key) | ((key == last_key) & (i <= last))
    return kept


@kernel("int64(int64, int64, int64, int64)")
def keep_prefix(vocab: Any, scratch: Any, count: Any, needed: Any) -> Any:
    """Keep the shortest prefix, in the order of falling key and rising id, whose weights sum up to at least
    `needed` (from 1 to the sum of all); returns the new number of candidates.

    A radix selection by 12, 10 and 10 bits of the key, best bits first: each round finds the bucket where the
    sum is reached, and leaves only that bucket's candidates undecided.
    """
    buckets, weights = i64_at(scratch), i64_at(part(scratch, vocab, WEIGHTS))
    keys, undecided = i32_at(part(scratch, vocab, KEYS)), i32_at(part(scratch, vocab, UNDECIDED))
    above = 0  # weight of the candidates that are surely kept
    for i in range(count):
        undecided[i] = i
    num_undecided = count
    shift = _KEY_BITS
    while shift > 0:
        bits = BUCKET_BITS if shift == _KEY_BITS else _LATER_BITS
        shift -= bits
        for bucket in range(1 << bits):
            buckets[bucket] = 0
        for j in range(num_undecided):
            i = undecided[j]
            buckets[digit(keys[i], shift, bits)] += weights[i]
        bucket = (1 << bits) - 1
        while above + buckets[bucket] < needed:
            above += buckets[bucket]
            bucket -= 1
        remaining = 0
        for j in range(num_undecided):
            i = undecided[j]
            undecided[remaining] = i
            remaining += digit(keys[i], shift, bits) == bucket
        num_undecided = remaining
    last = 0
    while above < needed:
        above += weights[undecided[last]]
        last += 1
    return keep_until(vocab, scratch, count, undecided[last - 1])


@kernel("int64(int64, int64, int64, int64)")
def keep_top_k(vocab: Any, scratch: Any, count: Any, k: Any) -> Any:
    """Keep the k >= 1 best candidates, or all if there are fewer; returns their number."""
    if count <= k:
        return count
    weights = i64_at(part(scratch, vocab, WEIGHTS))
    for i in range(count):
        weights[i] = 1
    return keep_prefix(vocab, scratch, count, k)


@kernel("int64(int64, int64, int64, float64, float64, float64)")
def keep_top_p(
    vocab: Any, scratch: Any, count: Any, top_p: Any, maximum: Any, inverse_temperature: Any
) -> Any:
    """Keep the best candidates up to a share `top_p` of the mass of all; returns their number."""
    weights, keys = i64_at(part(scratch, vocab, WEIGHTS)), i32_at(part(scratch, vocab, KEYS))
    total = 0
    for i in range(count):
        weights[i] = mass((logit_of(keys[i]) - maximum) * inverse_temperature)
        total += weights[i]
    needed = np.int64(np.ceil(top_p * np.float64(total)))
    return keep_prefix(vocab, scratch, count, max(needed, 1))


@kernel("int32(int64, int64, int64)")
def key_bound(vocab: Any, scratch: Any, k: Any) -> Any:
    """A key that the k >= 1 best tokens of the scanned row surely reach: the k-th greatest of the maxima."""
    maxima, keys = i32_at(part(scratch, vocab, MAXIMA)), i32_at(part(scratch, vocab, KEYS))
    blocks = num_blocks(vocab)
    lowest = MIN_INT32
    if k < blocks:
        for block in range(blocks):
            keys[block] = maxima[block]
        lowest = MAX_INT32
        for i in range(keep_top_k(vocab, scratch, blocks, k)):
            lowest = min(lowest, keys[i])
    return lowest
