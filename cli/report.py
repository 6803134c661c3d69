"""What `mvllm generate` prints besides plain text: JSON lines and statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median as median_of

from mvllm.core.engine.statistics import SpeculationTotals
from mvllm.core.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from mvllm.core.types import TokenId

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't express."""


def json_lines(id: str | int, output: RequestOutput) -> Iterator[str]:
    """One JSON object per answer."""
    for completion in output.outputs:
        fields: dict[str, object] = {
            "id": id,
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "usage": _usage(output, completion),
            "timings": _timings(output),
        }
        if completion.error is not None:
            fields["error"] = completion.error
        if completion.logprobs is not None:
            fields["cumulative_logprob"] = completion.cumulative_logprob
            fields["logprobs"] = [_logprob_fields(entry) for entry in completion.logprobs]
        # Half a surrogate pair, in an id say, has no UTF-8 form; its escape is JSON again.
        yield json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")


def json_error(id: str | int, error: str) -> str:
    """Stands for the answers of a prompt that was refused."""
    return json.dumps({"id": id, "error": error})


def _usage(output: RequestOutput, completion: CompletionOutput) -> dict[str, int]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def _timings(output: RequestOutput) -> dict[str, float | int | None]:
    metrics = output.metrics
    first = metrics.time_to_first_token
    return {
        "time_to_first_token_s": None if first is None else round(first, 6),
        "total_s": round(metrics.total_time, 6),
        "preemptions": metrics.num_preemptions,
    }


def _logprob_fields(entry: TokenLogprobs) -> dict[str, object]:
    chosen = entry.by_token[entry.token_id]
    top = [_token_fields(token, value) for token, value in entry.by_token.items()]
    return {**_token_fields(entry.token_id, chosen), "top": top}


def _token_fields(token: TokenId, value: Logprob) -> dict[str, object]:
    return {
        "token_id": token,
        "token": value.decoded_token,
        "bytes": list(value.token_bytes or b""),
        "logprob": max(value.logprob, _MIN_LOGPROB),
        "rank": value.rank,
    }


def statistics(
    outputs: Sequence[RequestOutput], wall_seconds: float, speculation: SpeculationTotals | None = None
) -> list[str]:
    """Lines for --stats. Rates are over all prompts together."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    generated = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    firsts = sorted(
        output.metrics.time_to_first_token
        for output in outputs
        if output.metrics.time_to_first_token is not None
    )
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    rows = [
        ("prompt tokens", f"{prompt} ({cached} from the prefix cache)"),
        ("generated tokens", f"{generated}"),
    ]
    if len(outputs) == 1 and firsts:
        decoded = generated - len(outputs[0].outputs)
        decode_seconds = outputs[0].metrics.total_time - firsts[0]
        rows.append(("time to first token", f"{firsts[0] * 1000:.0f} ms"))
        rows.append(("prefill", f"{(prompt - cached) / firsts[0]:.1f} tokens/s"))
        if decoded > 0 and decode_seconds > 0:
            rows.append(("decode", f"{decoded / decode_seconds:.1f} tokens/s"))
    elif firsts:
        median, largest = median_of(firsts) * 1000, firsts[-1] * 1000
        rows.append(("time to first token", f"{median:.0f} ms (median), {largest:.0f} ms (largest)"))
        rows.append(("throughput", f"{generated / wall_seconds:.1f} generated tokens/s"))
    rows.append(("preemptions", f"{preemptions}"))
    rows.append(("wall time", f"{wall_seconds:.2f} s, without loading"))
    if speculation is not None:
        rows += _speculation_rows(speculation)
    return [f"{name:21}{value}" for name, value in rows]


def _speculation_rows(totals: SpeculationTotals) -> list[tuple[str, str]]:
    rows = [
        ("drafts", f"{totals.num_proposed} proposed, {totals.num_accepted} accepted"),
        ("acceptance", f"{totals.acceptance_rate:.1%}" if totals.num_proposed else "none drafted"),
        ("tokens per pass", f"{totals.tokens_per_pass:.2f} ({totals.num_passes} passes of the model)"),
        ("draft lengths", _histogram(totals.proposed_lengths)),
        ("accepted lengths", _histogram(totals.accepted_lengths)),
        ("drafting", f"{totals.draft_seconds:.2f} s"),
        ("verifying", f"{totals.verify_seconds:.2f} s"),
    ]
    if totals.switched_off is not None:
        rows.append(("drafting ended", totals.switched_off))
    return rows


def _histogram(counts: Mapping[int, int]) -> str:
    """Each length with the number of passes that had it."""
    return ", ".join(f"{length}: {counts[length]}" for length in sorted(counts)) or "none"
