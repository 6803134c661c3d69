"""The text that `mvllm inspect --program` prints."""

from __future__ import annotations

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.link import LinkedProgram
from mvllm.backends.cpu.program import Array, Instruction
from mvllm.backends.cpu.tables import Epilogue, Regime

_LEGEND = """\
Columns: number; regimes in which all threads meet before it (1: one token, L: one logit row of several
tokens, M: many); what it does; output <- inputs. v5 is a float32 matrix, q5 and w5 its narrow and wide
records, b3 the buffer; a star marks what each thread computes for itself when there is a single row."""

_REGIME_LETTERS = {Regime.ONE_TOKEN: "1", Regime.ONE_LOGIT_ROW: "L", Regime.MANY: "M"}


def list_program(linked: LinkedProgram, threads: int) -> str:
    """One line per instruction."""
    program = linked.program
    lines = [
        f"{len(program.instructions)} instructions, {len(linked.memory)} buffers of "
        f"{linked.buffer_bytes / 2**20:.1f} MiB in all, {threads} threads",
        _LEGEND,
        "",
    ]
    for index, step in enumerate(program.instructions):
        regimes = linked.barriers[index]
        barriers = "".join(letter if regime in regimes else "." for regime, letter in _REGIME_LETTERS.items())
        lines.append(
            f"{index:4} {barriers} {step.kind:9} {_arrows(linked, step):34} {_details(step)}".rstrip()
        )
    return "\n".join(lines)


def _arrows(linked: LinkedProgram, step: Instruction) -> str:
    inputs = ", ".join(_name(linked, array) for array in (step.input, step.other) if array is not None)
    output = f"{_name(linked, step.output)} <- " if step.output is not None else ""
    return output + inputs


def _name(linked: LinkedProgram, array: Array) -> str:
    star = "*" if array in linked.program.private else ""
    return f"{array}{star}@b{linked.buffers[array].number}"


def _details(step: Instruction) -> str:
    match step.operation:
        case graph.Embed(table):
            return table.name
        case graph.RmsNorm(gain):
            return gain.name
        case graph.Linear(weight, bias):
            parts = [f"{weight.name} {weight.format_name} {list(weight.shape)}"]
            if bias is not None:
                parts.append("+ bias")
            if step.epilogue is not Epilogue.NONE:
                parts.append(f"then {step.epilogue.name.lower()}")
            return " ".join(parts)
        case graph.Attend(layer, window):
            return f"layer {layer}" + (f", window {window}" if window is not None else "")
        case _:
            return ""
