"""The compiled sampler: the reference sampler's tokens and logprobs, bit for bit, in a few passes.

Definitions: core/sampling/README.md. Beside this file: sampler_arithmetic.py (exp, log, noise),
sampler_candidates.py (scanning and filtering a row), sampler_table.py (inputs and outputs). Rows, scratch and
tables are raw addresses (int64), so each kernel has one signature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.pointers import f32_at, i32_at, i64_at, record_at
from mvllm.backends.cpu.sampler_arithmetic import (
    LOWEST_FINITE_KEY,
    key_of,
    log,
    logit_of,
    mass,
    noise_bound,
    row_state,
    uniform,
)
from mvllm.backends.cpu.sampler_candidates import (
    OK,
    argmax,
    collect,
    greatest_key,
    keep_top_k,
    keep_top_p,
    key_bound,
    part,
    scan,
)
from mvllm.backends.cpu.sampler_table import (
    IDS,
    KEYS,
    PARAMETERS,
    ROW_COPY,
)
from mvllm.core.sampling.arithmetic import MASS_UNITS
from mvllm.core.sampling.penalties import LARGEST_LOGIT
from mvllm.core.sampling.sampler import GREEDY_BELOW

_LARGEST_NOISE = 36.8  # above every value of the noise

_parameters = record_at(PARAMETERS)

# --- choosing ------------------------------------------------------------------------------------------


@kernel("int64(int64, int64, int64, float64, float64, uint64)")
def _draw(vocab: Any, scratch: Any, count: Any, maximum: Any, inverse_temperature: Any, state: Any) -> Any:
    """The candidate with the greatest scaled logit plus noise, ties to the lowest id.

    Nearly all candidates are seen to lose without a logarithm.
    """
    ids, keys = i32_at(part(scratch, vocab, IDS)), i32_at(part(scratch, vocab, KEYS))
    best, winner = -np.inf, np.int64(-1)
    for i in range(count):
        scaled = (logit_of(keys[i]) - maximum) * inverse_temperature
        if scaled + _LARGEST_NOISE < best:
            continue
        number = uniform(state, ids[i])
        if scaled + noise_bound(number) < best:
            continue
        value = scaled + -log(-log(number))
        if value > best:
            best, winner = value, np.int64(ids[i])
    return winner


@kernel("int64(int64, int64, int64, int64)")
def _choose(table: Any, row: Any, logits: Any, scratch: Any) -> Any:
    """The token for row `row`, whose logits, penalties and bias applied, are scanned."""
    columns = _parameters(table)
    vocab = columns.vocab
    temperature = f32_at(columns.temperature)[row]
    if temperature < GREEDY_BELOW:
        return argmax(logits, vocab, scratch)
    maximum = logit_of(greatest_key(vocab, scratch))
    inverse_temperature = 1.0 / np.float64(temperature)
    min_p = np.float64(f32_at(columns.min_p)[row])
    top_p = np.float64(f32_at(columns.top_p)[row])
    top_k = np.int64(i32_at(columns.top_k)[row])
    lowest_scaled = log(min_p) if min_p > 0.0 else -np.inf
    lowest_key = LOWEST_FINITE_KEY
    if top_k > 0:
        lowest_key = max(lowest_key, key_bound(vocab, scratch, top_k))
    count = collect(logits, vocab, scratch, lowest_key, maximum, inverse_temperature, lowest_scaled)
    if top_k > 0:
        count = keep_top_k(vocab, scratch, count, top_k)
    if top_p < 1.0:
        count = keep_top_p(vocab, scratch, count, top_p, maximum, inverse_temperature)
    seed = np.uint64(i64_at(columns.seed)[row])
    state = row_state(seed, np.int64(i32_at(columns.position)[row]))
    return _draw(vocab, scratch, count, maximum, inverse_temperature, state)


# --- penalties and bias: core/sampling/penalties.py ------------------------------------------------------


@kernel("float32(float64)")
def _rounded(value: Any) -> Any:
    """To float32; what is finite stays finite."""
    if value > LARGEST_LOGIT and value != np.inf:
        value = LARGEST_LOGIT
    if value < -LARGEST_LOGIT and value != -np.inf:
        value = -LARGEST_LOGIT
    return np.float32(value)


@kernel("void(int64, int64, int64)")
def _penalize(table: Any, row: Any, logits: Any) -> None:
    """Apply the penalties of row `row` to `logits` in place. Ids ascend; those from V on are left out."""
    columns, values = _parameters(table), f32_at(logits)
    repetition = np.float64(f32_at(columns.repetition_penalty)[row])
    presence = np.float64(f32_at(columns.presence_penalty)[row])
    frequency = np.float64(f32_at(columns.frequency_penalty)[row])
    offsets, tokens = i32_at(columns.count_offsets), i32_at(columns.count_tokens)
    prompt, output = i32_at(columns.prompt_counts), i32_at(columns.output_counts)
    for i in range(offsets[row], offsets[row + 1]):
        if tokens[i] >= columns.vocab:
            break
        value = np.float64(values[tokens[i]])
        if prompt[i] > 0 or output[i] > 0:
            value = value / repetition if value > 0.0 else value * repetition
        if output[i] > 0:
            value -= frequency * np.float64(output[i]) + presence
        values[tokens[i]] = _rounded(value)


@kernel("void(int64, int64, int64)")
def _bias(table: Any, row: Any, logits: Any) -> None:
    """Add the biases of row `row` to `logits` in place. Ids ascend; those from V on are left out."""
    columns, values = _parameters(table), f32_at(logits)
    offsets, tokens = i32_at(columns.bias_offsets), i32_at(columns.bias_tokens)
    biases = f32_at(columns.bias_values)
    for i in range(offsets[row], offsets[row + 1]):
        if tokens[i] >= columns.vocab:
            break
        values[tokens[i]] = _rounded(np.float64(values[tokens[i]]) + np.float64(biases[i]))


@kernel("void(int64, int64, int64, int64)")
def _modify(table: Any, row: Any, logits: Any, modified: Any) -> None:
    """Write `logits`, with penalties and bias applied, to `modified`."""
    source, destination = f32_at(logits), f32_at(modified)
    for i in range(_parameters(table).vocab):
        destination[i] = source[i]
    _penalize(table, row, modified)
    _bias(table, row, modified)


# --- logprobs, of the unmodified row ---------------------------------------------------------------------


@kernel("float64(int64, int64, float64)")
def _log_total(row: Any, vocab: Any, maximum: Any) -> Any:
    """Log of the sum of e**(logit - maximum)."""
    logits = f32_at(row)
    total = 0
    for i in range(vocab):
        total += mass(np.float64(logits[i]) - maximum)
    return log(np.float64(total) / np.float64(MASS_UNITS))


@kernel("int64(int64, int64, int64)")
def _rank(row: Any, vocab: Any, token: Any) -> Any:
    """Place of `token` by falling logit and rising id, from 1."""
    logits = f32_at(row)
    key = key_of(logits[token])
    rank = 1
    for i in range(vocab):
        rank += key_of(logits[i]) > key
    for i in range(token):
        rank += key_of(logits[i]) == key
    return rank


@kernel("void(int64, int64, int64, int64, float64, float64, int64, int64)")
def _write_top(
    logits: Any,
    vocab: Any,
    scratch: Any,
    k: Any,
    maximum: Any,
    log_total: Any,
    tokens: Any,
    logprobs: Any,
) -> None:
    """Write the k best tokens of the scanned row, best first, and their logprobs to two addresses."""
    ids, keys = i32_at(part(scratch, vocab, IDS)), i32_at(part(scratch, vocab, KEYS))
    count = collect(logits, vocab, scratch, key_bound(vocab, scratch, k), maximum, 1.0, -np.inf)
    count = keep_top_k(vocab, scratch, count, k)
    for i in range(1, count):
        place = i
        while place > 0 and keys[place - 1] < keys[place]:
            keys[place - 1], keys[place] = keys[place], keys[place - 1]
            ids[place - 1], ids[place] = ids[place], ids[place - 1]
            place -= 1
    top_tokens, top_logprobs = i32_at(tokens), f32_at(logprobs)
    for i in range(count):
        top_tokens[i] = ids[i]
        top_logprobs[i] = np.float32((logit_of(keys[i]) - maximum) - log_total)


@kernel("void(int64, int64, int64, int64, int64)")
def _write_logprobs(table: Any, row: Any, logits: Any, scratch: Any, token: Any) -> None:
    """Write what row `row` wants to know of its own logits, which are scanned."""
    columns, values = _parameters(table), f32_at(logits)
    vocab = columns.vocab
    maximum = logit_of(greatest_key(vocab, scratch))
    log_total = _log_total(logits, vocab, maximum)
    target = i32_at(columns.target)[row]
    if target >= 0:
        logprob = (logit_of(key_of(values[target])) - maximum) - log_total
        f32_at(columns.target_logprob)[row] = np.float32(logprob)
    k = np.int64(i32_at(columns.num_logprobs)[row])
    if k >= 0:
        logprob = (logit_of(key_of(values[token])) - maximum) - log_total
        f32_at(columns.logprob)[row] = np.float32(logprob)
        i32_at(columns.rank)[row] = _rank(logits, vocab, token)
    if k > 0:
        offset = 4 * columns.top_width * row
        tokens, logprobs = columns.top_tokens + offset, columns.top_logprobs + offset
        _write_top(logits, vocab, scratch, k, maximum, log_total, tokens, logprobs)


# --- rows ------------------------------------------------------------------------------------------------


@kernel("void(int64, int64, int64, int64)")
def sample_rows(parameters: Any, first_row: Any, last_row: Any, worker: Any) -> None:
    """Sample rows [first_row, last_row) in the scratch of `worker`; `parameters` is the address of a table
    that `pack_parameters` filled. Workers may run at once on disjoint rows. Logits are only read.
    """
    columns = _parameters(parameters)
    vocab, row_bytes = columns.vocab, 4 * columns.row_stride
    scratch = columns.scratch + worker * columns.scratch_stride
    counts, biases = i32_at(columns.count_offsets), i32_at(columns.bias_offsets)
    num_logprobs, targets = i32_at(columns.num_logprobs), i32_at(columns.target)
    for row in range(first_row, last_row):
        logits = columns.logits + row_bytes * row
        modified = logits
        status = scan(logits, vocab, scratch)
        changed = counts[row] < counts[row + 1] or biases[row] < biases[row + 1]
        if status == OK and changed:
            modified = part(scratch, vocab, ROW_COPY)
            _modify(parameters, row, logits, modified)
            status = scan(modified, vocab, scratch)
        i32_at(columns.status)[row] = status
        if status != OK:
            continue
        token = _choose(parameters, row, modified, scratch)
        i32_at(columns.tokens)[row] = token
        if num_logprobs[row] >= 0 or targets[row] >= 0:
            if changed:
                scan(logits, vocab, scratch)
            _write_logprobs(parameters, row, logits, scratch, token)
