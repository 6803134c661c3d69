"""The compiled sampler: the reference sampler's tokens and logprobs, bit for bit, in a few passes.

Definitions: core/sampling/README.md. Two of them make speed possible. Every filter keeps a prefix of one order
(falling logit, rising id), so a radix selection replaces the sort; and probability masses are integers, so
their sums may be taken in any order.

Terms: the *key* of a logit is an int32 with the order of the floats, 0.0 and -0.0 being one. The vocabulary is
cut into blocks of 64 tokens, whose greatest keys (*maxima*) let most blocks be passed over. *Candidates* are the
tokens still in play, by rising id: ids, keys and weights (masses, or ones where tokens are counted).

Everything takes raw addresses as int64, so each kernel has one signature. This file holds all kernels of the
sampler, because Numba's cache notices changes of a function's own file only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.sampler_table import (
    BLOCK,
    BUCKET_BITS,
    NUM_BUCKETS,
    NUM_COLUMNS,
    Column,
    empty_output,
    pack_parameters,
    sampler_scratch_bytes,
)
from mvllm.core.sampling.arithmetic import (
    EXP_COEFFICIENTS,
    EXP_FLOOR,
    EXPONENT_BIAS,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_COEFFICIENTS,
    MANTISSA_BITS,
    MANTISSA_MASK,
    MASS_UNITS,
    ONE_BITS,
    ROUND_TO_INTEGER,
    SQRT_2,
)
from mvllm.core.sampling.keyed_noise import GAMMA, MIX_1, MIX_2, UNIFORM_BITS
from mvllm.core.sampling.penalties import LARGEST_LOGIT
from mvllm.core.sampling.sampler import GREEDY_BELOW
from mvllm.core.step import RowStatus, SamplingArrays, StepOutput

__all__ = ["pack_parameters", "sample", "sample_rows", "sampler_scratch_bytes"]

_INFINITY_BITS = 0x7F800000
_INFINITY_KEY = np.int32(_INFINITY_BITS)
_MINUS_INFINITY_KEY = np.int32(-_INFINITY_BITS - 1)
_LOWEST_FINITE_KEY = np.int32(-_INFINITY_BITS)
_MIN_INT32 = np.int32(-(2**31))
_MAX_INT32 = np.int32(2**31 - 1)
_SIGN_SHIFT = np.int32(31)

_UNIFORM_STEP = 2.0**-UNIFORM_BITS
_MANTISSA_STEP = 2.0**-MANTISSA_BITS
_MASS_SCALE = float(MASS_UNITS)
_MASS_SHIFT = 2.0**MANTISSA_BITS
_MASS_SHIFT_BITS = int(np.float64(_MASS_SHIFT).view(np.int64))
_LN2 = LN2_HIGH + LN2_LOW
_LARGEST_NOISE = 36.8  # above every value of the noise
_BOUND_SLACK = 1e-9  # far above the rounding errors of the bound on the noise

_UNBOUNDED = 2**31

_GAMMA, _MIX_1, _MIX_2, _ONE = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2), np.uint64(1)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_UNIFORM = np.uint64(64 - UNIFORM_BITS)

_OK, _NAN, _INFINITE, _EMPTY = (int(status) for status in RowStatus)


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """The int64 `address` as a pointer that carray takes."""

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


# --- arithmetic: core/sampling/arithmetic.py and keyed_noise.py, operation by operation -----------------


@kernel("int64(float64)")
def _mass(x: Any) -> Any:
    x = max(x, EXP_FLOOR)
    shifted = x * LOG2_E + ROUND_TO_INTEGER
    power = shifted - ROUND_TO_INTEGER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = 0.0
    for coefficient in EXP_COEFFICIENTS:
        series = series * rest + coefficient
    scale = np.int64((np.float64(shifted).view(np.int64) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float64)
    return np.float64(series * scale * _MASS_SCALE + _MASS_SHIFT).view(np.int64) - _MASS_SHIFT_BITS


@kernel("float64(float64)")
def _log(x: Any) -> Any:
    bits = np.float64(x).view(np.int64)
    power = (bits >> MANTISSA_BITS) - EXPONENT_BIAS
    mantissa = np.int64((bits & MANTISSA_MASK) | ONE_BITS).view(np.float64)
    if mantissa > SQRT_2:
        mantissa *= 0.5
        power += 1
    exponent = np.float64(power)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    series = 0.0
    for coefficient in LOG_COEFFICIENTS:
        series = series * square + coefficient
    return exponent * LN2_HIGH + (exponent * LN2_LOW + (f + f) * series)


@kernel("uint64(uint64)")
def _mix(z: Any) -> Any:
    z = (z ^ (z >> _SHIFT_30)) * _MIX_1
    z = (z ^ (z >> _SHIFT_27)) * _MIX_2
    return z ^ (z >> _SHIFT_31)


@kernel("uint64(uint64, int64)")
def _row_state(seed: Any, position: Any) -> Any:
    return _mix(_mix(seed + _GAMMA) + np.uint64(position + 1) * _GAMMA)


# --- arrays of the table, their lengths unknown here ----------------------------------------------------


@kernel("int32[::1](int64)")
def _int32s(address: Any) -> Any:
    return carray(_pointer(address), (_UNBOUNDED,), np.int32)


@kernel("float32[::1](int64)")
def _float32s(address: Any) -> Any:
    return carray(_pointer(address), (_UNBOUNDED,), np.float32)


# --- a worker's scratch ---------------------------------------------------------------------------------


@kernel("int64(int64)")
def _num_blocks(vocab: Any) -> Any:
    return (vocab + BLOCK - 1) // BLOCK


@kernel("int64[::1](int64)")
def _buckets(scratch: Any) -> Any:
    return carray(_pointer(scratch), (NUM_BUCKETS,), np.int64)


@kernel("int64[::1](int64, int64)")
def _weights(scratch: Any, vocab: Any) -> Any:
    return carray(_pointer(scratch + 8 * NUM_BUCKETS), (vocab,), np.int64)


@kernel("int32[::1](int64, int64)")
def _ids(scratch: Any, vocab: Any) -> Any:
    capacity = _num_blocks(vocab) * BLOCK
    return carray(_pointer(scratch + 8 * NUM_BUCKETS + 8 * capacity), (vocab,), np.int32)


@kernel("int32[::1](int64, int64)")
def _keys(scratch: Any, vocab: Any) -> Any:
    capacity = _num_blocks(vocab) * BLOCK
    return carray(_pointer(scratch + 8 * NUM_BUCKETS + 12 * capacity), (vocab,), np.int32)


@kernel("float32[::1](int64, int64)")
def _row_copy(scratch: Any, vocab: Any) -> Any:
    capacity = _num_blocks(vocab) * BLOCK
    return carray(_pointer(scratch + 8 * NUM_BUCKETS + 16 * capacity), (vocab,), np.float32)


@kernel("int32[::1](int64, int64)")
def _undecided(scratch: Any, vocab: Any) -> Any:
    capacity = _num_blocks(vocab) * BLOCK
    return carray(_pointer(scratch + 8 * NUM_BUCKETS + 20 * capacity), (vocab,), np.int32)


@kernel("int32[::1](int64, int64)")
def _maxima(scratch: Any, vocab: Any) -> Any:
    blocks = _num_blocks(vocab)
    return carray(_pointer(scratch + 8 * NUM_BUCKETS + 24 * blocks * BLOCK), (blocks,), np.int32)


# --- keys and blocks ------------------------------------------------------------------------------------


@kernel("int32(float32)")
def _key(logit: Any) -> Any:
    bits = np.float32(logit + np.float32(0.0)).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN_SHIFT) & _MAX_INT32))


@kernel("float64(int32)")
def _logit(key: Any) -> Any:
    bits = np.int32(key ^ ((key >> _SIGN_SHIFT) & _MAX_INT32))
    return np.float64(np.int32(bits).view(np.float32))


@kernel("int64(float32[::1], int64)")
def _scan(logits: Any, scratch: Any) -> Any:
    """Write the block maxima of a row; returns its status."""
    vocab = len(logits)
    maxima = _maxima(scratch, vocab)
    highest, lowest = _MIN_INT32, _MAX_INT32
    for block in range(len(maxima)):
        block_maximum = _MIN_INT32
        start = block * BLOCK
        for i in range(min(BLOCK, vocab - start)):
            key = _key(logits[start + i])
            block_maximum = max(block_maximum, key)
            lowest = min(lowest, key)
        maxima[block] = block_maximum
        highest = max(highest, block_maximum)
    if highest > _INFINITY_KEY or lowest < _MINUS_INFINITY_KEY:
        return _NAN
    if highest == _INFINITY_KEY:
        return _INFINITE
    return _EMPTY if highest == _MINUS_INFINITY_KEY else _OK


@kernel("int32(int64, int64)")
def _greatest(scratch: Any, vocab: Any) -> Any:
    """The greatest key of the scanned row."""
    greatest = _MIN_INT32
    for key in _maxima(scratch, vocab):
        greatest = max(greatest, key)
    return greatest


@kernel("int64(float32[::1], int64)")
def _argmax(logits: Any, scratch: Any) -> Any:
    """The lowest id among the most likely tokens of the scanned row."""
    maxima = _maxima(scratch, len(logits))
    greatest = _greatest(scratch, len(logits))
    block = 0
    while maxima[block] != greatest:
        block += 1
    token = block * BLOCK
    while _key(logits[token]) != greatest:
        token += 1
    return token


# --- candidates -----------------------------------------------------------------------------------------


@kernel("int64(float32[::1], int64, int32, float64, float64, float64)")
def _collect(
    logits: Any, scratch: Any, lowest_key: Any, maximum: Any, inverse_temperature: Any, lowest_scaled: Any
) -> Any:
    """Make the tokens of at least `lowest_key` and `lowest_scaled` the candidates; returns their number."""
    vocab = len(logits)
    maxima, ids, keys = _maxima(scratch, vocab), _ids(scratch, vocab), _keys(scratch, vocab)
    count = 0
    for block in range(len(maxima)):
        key = maxima[block]
        if key < lowest_key or (_logit(key) - maximum) * inverse_temperature < lowest_scaled:
            continue
        start = block * BLOCK
        for i in range(min(BLOCK, vocab - start)):
            key = _key(logits[start + i])
            scaled = (_logit(key) - maximum) * inverse_temperature
            ids[count] = start + i
            keys[count] = key
            count += np.int64(key >= lowest_key and scaled >= lowest_scaled)
    return count


@kernel("int64(int32, int64, int64)")
def _digit(key: Any, shift: Any, bits: Any) -> Any:
    """`bits` bits of a key from bit `shift` up, greater for greater keys."""
    return ((np.int64(key) - _MIN_INT32) >> shift) & ((1 << bits) - 1)


@kernel("int64(int64, int64, int64, int64)")
def _keep_prefix(scratch: Any, vocab: Any, count: Any, needed: Any) -> Any:
    """Keep the shortest prefix, in the order of falling key and rising id, whose weights sum up to `needed` or
    more (from 1 to the sum of all); returns the new number of candidates.

    A radix selection by 12, 10 and 10 bits of the key, best bits first: each round finds the bucket where the
    sum is reached, and leaves only that bucket's candidates undecided.
    """
    buckets, undecided = _buckets(scratch), _undecided(scratch, vocab)
    weights, ids, keys = _weights(scratch, vocab), _ids(scratch, vocab), _keys(scratch, vocab)
    above = 0  # weight of the candidates that are surely kept
    num_undecided = count
    for i in range(count):
        undecided[i] = i
    shift = 32
    while shift > 0:
        bits = BUCKET_BITS if shift == 32 else 10
        shift -= bits
        for bucket in range(1 << bits):
            buckets[bucket] = 0
        for j in range(num_undecided):
            i = undecided[j]
            buckets[_digit(keys[i], shift, bits)] += weights[i]
        bucket = (1 << bits) - 1
        while above + buckets[bucket] < needed:
            above += buckets[bucket]
            bucket -= 1
        remaining = 0
        for j in range(num_undecided):
            i = undecided[j]
            undecided[remaining] = i
            remaining += np.int64(_digit(keys[i], shift, bits) == bucket)
        num_undecided = remaining
    last_key = keys[undecided[0]]
    j = 0
    while above < needed:
        above += weights[undecided[j]]
        j += 1
    last = undecided[j - 1]
    kept = 0
    for i in range(count):
        key = keys[i]
        ids[kept], keys[kept] = ids[i], key
        kept += np.int64(key > last_key or (key == last_key and i <= last))
    return kept


@kernel("int64(int64, int64, int64, int64)")
def _keep_top_k(scratch: Any, vocab: Any, count: Any, k: Any) -> Any:
    """Keep the k >= 1 best candidates, or all if there are fewer; returns the new number of candidates."""
    if count <= k:
        return count
    weights = _weights(scratch, vocab)
    for i in range(count):
        weights[i] = 1
    return _keep_prefix(scratch, vocab, count, k)


@kernel("int64(int64, int64, int64, float64, float64, float64)")
def _keep_top_p(
    scratch: Any, vocab: Any, count: Any, top_p: Any, maximum: Any, inverse_temperature: Any
) -> Any:
    """Keep the best candidates up to a share `top_p` of the mass of all; returns their number."""
    weights, keys = _weights(scratch, vocab), _keys(scratch, vocab)
    total = 0
    for i in range(count):
        weights[i] = _mass((_logit(keys[i]) - maximum) * inverse_temperature)
        total += weights[i]
    needed = np.int64(np.ceil(top_p * np.float64(total)))
    return _keep_prefix(scratch, vocab, count, max(needed, 1))


@kernel("int32(int64, int64, int64)")
def _key_bound(scratch: Any, vocab: Any, k: Any) -> Any:
    """A key that the k best tokens of the scanned row surely reach: the k-th greatest block maximum."""
    maxima, keys = _maxima(scratch, vocab), _keys(scratch, vocab)
    if k >= len(maxima):
        return _MIN_INT32
    for i in range(len(maxima)):
        keys[i] = maxima[i]
    count = _keep_top_k(scratch, vocab, len(maxima), k)
    lowest = _MAX_INT32
    for i in range(count):
        lowest = min(lowest, keys[i])
    return lowest


# --- choosing -------------------------------------------------------------------------------------------


@kernel("int64(int64, int64, int64, float64, float64, uint64)")
def _draw(scratch: Any, vocab: Any, count: Any, maximum: Any, inverse_temperature: Any, state: Any) -> Any:
    """The candidate with the greatest scaled logit plus noise, ties to the lowest id.

    -log(-log(u)) <= -log(1 - u), and the bits of a float, read as a number, bound its logarithm from below. So
    nearly all candidates are seen to lose without a logarithm.
    """
    ids, keys = _ids(scratch, vocab), _keys(scratch, vocab)
    best, winner = -np.inf, -1
    for i in range(count):
        scaled = (_logit(keys[i]) - maximum) * inverse_temperature
        if scaled + _LARGEST_NOISE < best:
            continue
        raw = _mix(state + (np.uint64(ids[i]) + _ONE) * _GAMMA)
        uniform = (np.float64(np.int64(raw >> _SHIFT_UNIFORM)) + 0.5) * _UNIFORM_STEP
        log2_bound = np.float64(np.float64(1.0 - uniform).view(np.int64) - ONE_BITS) * _MANTISSA_STEP
        if scaled + (_BOUND_SLACK - log2_bound * _LN2) < best:
            continue
        value = scaled + -_log(-_log(uniform))
        if value > best:
            best, winner = value, np.int64(ids[i])
    return winner


@kernel("int64(float32[::1], int64, int64[::1], int64)")
def _choose(logits: Any, scratch: Any, table: Any, row: Any) -> Any:
    """The token for row `row`, whose logits, penalties and bias applied, are scanned."""
    temperature = _float32s(table[Column.TEMPERATURE])[row]
    if temperature < GREEDY_BELOW:
        return _argmax(logits, scratch)
    vocab = len(logits)
    maximum = _logit(_greatest(scratch, vocab))
    inverse_temperature = 1.0 / np.float64(temperature)
    min_p = np.float64(_float32s(table[Column.MIN_P])[row])
    top_p = np.float64(_float32s(table[Column.TOP_P])[row])
    top_k = np.int64(_int32s(table[Column.TOP_K])[row])
    lowest_scaled = _log(min_p) if min_p > 0.0 else -np.inf
    lowest_key = _LOWEST_FINITE_KEY
    if top_k > 0:
        lowest_key = max(lowest_key, _key_bound(scratch, vocab, top_k))
    count = _collect(logits, scratch, lowest_key, maximum, inverse_temperature, lowest_scaled)
    if top_k > 0:
        count = _keep_top_k(scratch, vocab, count, top_k)
    if top_p < 1.0:
        count = _keep_top_p(scratch, vocab, count, top_p, maximum, inverse_temperature)
    seed = carray(_pointer(table[Column.SEED]), (_UNBOUNDED,), np.uint64)[row]
    state = _row_state(seed, np.int64(_int32s(table[Column.POSITION])[row]))
    return _draw(scratch, vocab, count, maximum, inverse_temperature, state)


# --- penalties and bias: core/sampling/penalties.py -----------------------------------------------------


@kernel("float32(float64)")
def _rounded(value: Any) -> Any:
    """To float32; what is finite stays finite."""
    if value > LARGEST_LOGIT and value != np.inf:
        value = LARGEST_LOGIT
    if value < -LARGEST_LOGIT and value != -np.inf:
        value = -LARGEST_LOGIT
    return np.float32(value)


@kernel("void(float32[::1], int64[::1], int64)")
def _penalize(logits: Any, table: Any, row: Any) -> None:
    """Apply the penalties of a row in place."""
    repetition = np.float64(_float32s(table[Column.REPETITION_PENALTY])[row])
    presence = np.float64(_float32s(table[Column.PRESENCE_PENALTY])[row])
    frequency = np.float64(_float32s(table[Column.FREQUENCY_PENALTY])[row])
    offsets, tokens = _int32s(table[Column.COUNT_OFFSETS]), _int32s(table[Column.COUNT_TOKENS])
    prompt, output = _int32s(table[Column.PROMPT_COUNTS]), _int32s(table[Column.OUTPUT_COUNTS])
    for i in range(offsets[row], offsets[row + 1]):
        value = np.float64(logits[tokens[i]])
        if prompt[i] > 0 or output[i] > 0:
            value = value / repetition if value > 0.0 else value * repetition
        if output[i] > 0:
            value -= frequency * np.float64(output[i]) + presence
        logits[tokens[i]] = _rounded(value)


@kernel("void(float32[::1], int64[::1], int64)")
def _bias(logits: Any, table: Any, row: Any) -> None:
    """Add the biases of a row in place."""
    offsets, tokens = _int32s(table[Column.BIAS_OFFSETS]), _int32s(table[Column.BIAS_TOKENS])
    values = _float32s(table[Column.BIAS_VALUES])
    for i in range(offsets[row], offsets[row + 1]):
        logits[tokens[i]] = _rounded(np.float64(logits[tokens[i]]) + np.float64(values[i]))


# --- logprobs, of the unmodified row --------------------------------------------------------------------


@kernel("float64(float32[::1], float64)")
def _log_total(logits: Any, maximum: Any) -> Any:
    """Log of the sum of e**(logit - maximum)."""
    total = 0
    for i in range(len(logits)):
        total += _mass(np.float64(logits[i]) - maximum)
    return _log(np.float64(total) / _MASS_SCALE)


@kernel("int64(float32[::1], int64)")
def _rank(logits: Any, token: Any) -> Any:
    """Place of `token` by falling logit and rising id, from 1."""
    key = _key(logits[token])
    rank = 1
    for i in range(len(logits)):
        rank += np.int64(_key(logits[i]) > key)
    for i in range(token):
        rank += np.int64(_key(logits[i]) == key)
    return rank


@kernel("void(float32[::1], int64, int64, float64, float64, int64, int64)")
def _write_top(
    logits: Any, scratch: Any, k: Any, maximum: Any, log_total: Any, tokens: Any, logprobs: Any
) -> None:
    """Write the k best tokens of the scanned row, best first, and their logprobs to two addresses."""
    vocab = len(logits)
    top_tokens = carray(_pointer(tokens), (k,), np.int32)
    top_logprobs = carray(_pointer(logprobs), (k,), np.float32)
    ids, keys = _ids(scratch, vocab), _keys(scratch, vocab)
    count = _collect(logits, scratch, _key_bound(scratch, vocab, k), maximum, 1.0, -np.inf)
    count = _keep_top_k(scratch, vocab, count, k)
    for i in range(count):
        place = i
        while place > 0 and keys[place - 1] < keys[place]:
            keys[place - 1], keys[place] = keys[place], keys[place - 1]
            ids[place - 1], ids[place] = ids[place], ids[place - 1]
            place -= 1
    for i in range(count):
        top_tokens[i] = ids[i]
        top_logprobs[i] = np.float32((_logit(keys[i]) - maximum) - log_total)


# --- rows -----------------------------------------------------------------------------------------------


@kernel("void(int64[::1], int64, float32[::1], int64, int64)")
def _write_logprobs(table: Any, row: Any, logits: Any, scratch: Any, token: Any) -> None:
    """Write what row `row` wants to know of its own logits, which are scanned."""
    maximum = _logit(_greatest(scratch, len(logits)))
    log_total = _log_total(logits, maximum)
    target = np.int64(_int32s(table[Column.TARGET])[row])
    if target >= 0:
        logprob = (_logit(_key(logits[target])) - maximum) - log_total
        _float32s(table[Column.TARGET_LOGPROB])[row] = np.float32(logprob)
    k = np.int64(_int32s(table[Column.NUM_LOGPROBS])[row])
    if k >= 0:
        logprob = (_logit(_key(logits[token])) - maximum) - log_total
        _float32s(table[Column.LOGPROB])[row] = np.float32(logprob)
        _int32s(table[Column.RANK])[row] = _rank(logits, token)
    if k > 0:
        offset = 4 * table[Column.TOP_WIDTH] * row
        top_tokens, top_logprobs = table[Column.TOP_TOKENS] + offset, table[Column.TOP_LOGPROBS] + offset
        _write_top(logits, scratch, k, maximum, log_total, top_tokens, top_logprobs)


@kernel("int64(float32[::1], int64[::1], int64, int64)")
def _modify(logits: Any, table: Any, row: Any, scratch: Any) -> Any:
    """Copy a row, apply penalties and bias to the copy and scan it; returns its status."""
    modified = _row_copy(scratch, len(logits))
    for i in range(len(logits)):
        modified[i] = logits[i]
    _penalize(modified, table, row)
    _bias(modified, table, row)
    return _scan(modified, scratch)


@kernel("void(int64, int64, int64, int64)")
def sample_rows(parameters: Any, first_row: Any, last_row: Any, worker: Any) -> None:
    """Sample rows [first_row, last_row) in the scratch of `worker`; `parameters` is the address of a table that
    `pack_parameters` filled. Workers may run at once on disjoint rows. Logits are only read.
    """
    table = carray(_pointer(parameters), (NUM_COLUMNS,), np.int64)
    scratch = table[Column.SCRATCH] + worker * table[Column.SCRATCH_STRIDE]
    vocab, row_bytes = table[Column.VOCAB], 4 * table[Column.ROW_STRIDE]
    counts, biases = _int32s(table[Column.COUNT_OFFSETS]), _int32s(table[Column.BIAS_OFFSETS])
    num_logprobs, targets = _int32s(table[Column.NUM_LOGPROBS]), _int32s(table[Column.TARGET])
    for row in range(first_row, last_row):
        logits = carray(_pointer(table[Column.LOGITS] + row_bytes * row), (vocab,), np.float32)
        changed = counts[row] < counts[row + 1] or biases[row] < biases[row + 1]
        status = _scan(logits, scratch)
        if status == _OK and changed:
            status = _modify(logits, table, row, scratch)
        _int32s(table[Column.STATUS])[row] = status
        if status != _OK:
            continue
        token = _choose(_row_copy(scratch, vocab) if changed else logits, scratch, table, row)
        _int32s(table[Column.TOKENS])[row] = token
        if num_logprobs[row] >= 0 or targets[row] >= 0:
            if changed:
                _scan(logits, scratch)
            _write_logprobs(table, row, logits, scratch, token)


def sample(logits: NDArray[np.float32], sampling: SamplingArrays) -> StepOutput:
    """`mvllm.core.sampling.sampler.sample`, compiled: the same result for logits f32[S, V], rows contiguous."""
    rows, vocab = logits.shape
    output = empty_output(sampling)
    scratch_bytes = sampler_scratch_bytes(vocab)
    scratch = np.empty(scratch_bytes // 8, np.int64)
    table = np.empty(NUM_COLUMNS, np.int64)
    pack_parameters(
        table,
        logits=logits.ctypes.data,
        row_stride=logits.strides[0] // logits.itemsize,
        vocab=vocab,
        sampling=sampling,
        output=output,
        scratch=scratch.ctypes.data,
        scratch_stride=scratch_bytes,
    )
    sample_rows(table.ctypes.data, 0, rows, 0)
    return output
