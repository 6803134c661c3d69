"""The results as tables and as a report in Markdown."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mvllm.bench.peers.results import Start, Summary
from mvllm.bench.peers.workloads import SEQUENCE_CONTEXT

COMMAND = "python -m mvllm.bench.peers.llama_cpp"

_PROCEDURE = """\
## Procedure

Each engine runs in a process of its own with the same number of threads and is idle while the other is
measured. A round measures one engine, the read bandwidth of the memory, then the other engine; who begins
changes from round to round. Ratios are taken within a round; the table has their median, lowest and highest.
Every measurement repeats its case for at least {sample_seconds:g} s, after a warm-up that is not counted.

- *decode-N*: greedy tokens of one sequence after N tokens of text; *sequences-N*: of N sequences at once,
  after {context} different tokens each, all their tokens together; the prompts are computed beforehand.
  *prefill-N*: from a prompt of N tokens to its first output token.
- mvllm is measured through its whole engine (scheduler, forward, sampler, text), llama.cpp through its C
  interface (forward and argmax). The text is the language reference that comes with Python.
- *foreign*: share of a core that all other processes took, the largest of the round's parts; median of the
  rounds. Rounds above {max_foreign:g} are dropped and counted.
- *bandwidth*: a compiled loop that adds up an array of 256 MiB, on as many threads. *of bandwidth*: bytes of
  the file's weights that a decoding step reads ({weight_mb:.0f} MB), times steps per second, over the
  bandwidth of the same round.
- *same tokens*: greedy tokens of the first sequence before the first difference, the fewest of all rounds.
  The engines round differently, so a near tie may part them.
"""

_STARTS = """\
Loading is timed as it came, with files and compiled kernels in memory or not. Peak resident memory includes
mapped files and the KV pool of these cases:
"""

_LIMITS = """\
## What this does not show

Other processors, thread counts and files; llama.cpp with settings tuned by hand; the time to compile kernels
on a first start. Other virtual machines on the same hardware take memory bandwidth without being seen.
"""


def table(summaries: Sequence[Summary]) -> str:
    """One row per case, as a Markdown table."""
    head = ["tokens/s", "mvllm", "llama.cpp", "ratio", "rounds", "foreign", "bandwidth, GB/s"]
    head += ["mvllm of bandwidth", "llama.cpp of bandwidth", "same tokens"]
    return _table(head, [_row(summary) for summary in summaries])


def _row(summary: Summary) -> list[str]:
    ratio, same = summary.ratio, summary.same_tokens
    return [
        summary.case,
        _number(summary.ours),
        _number(summary.theirs),
        f"{ratio.median:.2f} ({ratio.lowest:.2f} to {ratio.highest:.2f})" if ratio else "",
        f"{summary.num_kept} of {summary.num_kept + summary.num_dropped}",
        "" if summary.foreign_load is None else f"{summary.foreign_load:.2f}",
        "" if summary.bandwidth is None else f"{summary.bandwidth / 1e9:.1f}",
        _percent(summary.our_share),
        _percent(summary.their_share),
        f"{same[0]} of {same[1]}" if same else "",
    ]


def start_table(starts: Sequence[Start]) -> str:
    """Loading time and memory of each engine: median and largest over its starts."""
    rows = []
    for engine in dict.fromkeys(start.engine for start in starts):
        own = [start for start in starts if start.engine == engine]
        peaks = [start.peak_rss_bytes for start in own if start.peak_rss_bytes is not None]
        load = statistics.median(start.load_seconds for start in own)
        rows.append([engine, f"{load:.2f}", f"{max(peaks) / 2**20:.0f}" if peaks else "", str(len(own))])
    return _table(["engine", "load, s", "peak memory, MiB", "starts"], rows)


def facts_table(facts: Mapping[str, str]) -> str:
    return _table(["what", ""], [[name, value.replace("|", ",")] for name, value in facts.items()])


def report(
    facts: Mapping[str, str],
    summaries: Sequence[Summary],
    starts: Sequence[Start],
    arguments: Sequence[str],
    *,
    weight_bytes: int,
    sample_seconds: float,
    max_foreign: float,
    plot: str | None,
) -> str:
    """The whole report.

    Args:
        arguments: of the command; folders in it are left out.
        weight_bytes: of the file's weights, what one decoding step reads.
        plot: the figure's address, relative to the report.
    """
    procedure = _PROCEDURE.format(
        sample_seconds=sample_seconds,
        context=SEQUENCE_CONTEXT,
        max_foreign=max_foreign,
        weight_mb=weight_bytes / 1e6,
    )
    parts = [
        f"# Beside llama.cpp: {facts['model']}\n",
        f"```console\n{command_line(arguments)}\n```\n",
        table(summaries),
        f"![tokens per second]({plot})\n" if plot else "",
        _STARTS,
        start_table(starts),
        "## Machine and versions\n",
        facts_table(facts),
        procedure,
        _LIMITS,
    ]
    return "\n".join(part for part in parts if part)


def command_line(arguments: Sequence[str]) -> str:
    """The command with names instead of paths."""
    return f"{COMMAND} {shlex.join(re.sub(r'[^=]*/', '', word) for word in arguments)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
