"""What a chat template may use up: a budget of work, a deadline, and bounds on the values it makes.

A template comes out of a model file and may be hostile. Its loops, calls and operators report here. The sizes
are bounded *before* a value is made wherever one operation can make a value much larger than its operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from jinja2.utils import Namespace

from mvllm.core.errors import TemplateError

MAX_SIZE = 4_000_000
"""Of one value, nested ones included, and of the output: characters, and ELEMENT_SIZE for each element."""

MAX_WORK = 100_000_000
"""Of one rendering: the sizes of all values made, and STEP_WORK for each loop turn, call and operator."""

STEP_WORK = 50

ELEMENT_SIZE = 16
"""What one element of a list or mapping, or one number, counts for: what it takes beside its characters."""

MAX_SECONDS = 3.0
"""Of one rendering. Looked at on every step: one operation on values of MAX_SIZE can exceed it."""

_MAX_INTEGER_BITS = 4096
_MAX_JSON_DEPTH = 100
_NUMBER = re.compile(r"\d+")
_WIDTH_FROM_ARGUMENT = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")

Value = TypeVar("Value")


class Budget:
    """Owns what is left to one rendering; `current` holds the one of the running context."""

    current: ContextVar[Budget] = ContextVar("template_budget")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._work = MAX_WORK

    def spend(self, work: int) -> None:
        """Take one step and `work` from the budget. Raises TemplateError when it is used up."""
        self._work -= STEP_WORK + work
        if self._work < 0:
            raise TemplateError(f"the chat template did more work than the limit of {MAX_WORK} units")
        if self._clock() > self._deadline:
            raise TemplateError(f"the chat template took longer than {MAX_SECONDS:g} s")


def spend(work: int) -> None:
    Budget.current.get().spend(work)


def size_of(value: object) -> int:
    """The size of a value, its parts counted as often as printing it would; at most MAX_SIZE + 1."""
    total = 0
    waiting: list[object] = [value]
    while waiting and total <= MAX_SIZE:
        item = waiting.pop()
        total += ELEMENT_SIZE
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting.extend(islice(item.keys(), MAX_SIZE))
            waiting.extend(islice(item.values(), MAX_SIZE))
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif isinstance(item, Namespace):
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
    return min(total, MAX_SIZE + 1)


def require_size(size: int) -> None:
    """Raises TemplateError: a value of `size` would be too large."""
    if size > MAX_SIZE:
        raise TemplateError(f"the chat template makes a value above the limit of {MAX_SIZE} characters")


def measured(value: Value) -> Value:
    """`value`, after its size was checked and spent."""
    size = size_of(value)
    require_size(size)
    spend(size)
    return value


def listed(items: Iterable[Any]) -> list[Any]:
    """The items, which a template may give as an endless or lazy sequence, as a list of bounded size."""
    found = list(islice(items, MAX_SIZE + 1))
    require_size(len(found))
    return found


def check_operator(operator: str, left: object, right: object) -> None:
    """Bound the result of a binary operator. Raises TemplateError."""
    if operator == "%" and isinstance(left, str):
        arguments = right if isinstance(right, tuple) else (right,)
        require_size(_formatted_size(left, *arguments))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * abs(right))
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() + right.bit_length())
    elif operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(times, int):
                length = len(repeated) if isinstance(repeated, str) else size_of(repeated)
                require_size(length * times)


def _require_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateError(f"the chat template makes an integer of more than {_MAX_INTEGER_BITS} bits")


def _formatted_size(text: str, *arguments: object, **named: object) -> int:
    """At least the length of `text` with its fields filled; every number in it may be a width."""
    given = [*arguments, *named.values()]
    widths = [int(number) for number in _NUMBER.findall(text)]
    if _WIDTH_FROM_ARGUMENT.search(text):
        widths += [value for value in given if isinstance(value, int)]
    widest = max([*map(size_of, given), *widths], default=0)
    return len(text) + (text.count("%") + text.count("{")) * widest


def _replaced_size(text: object, old: object, new: object, count: object = None) -> int:
    return size_of(text) + str(text).count(str(old)) * len(str(new))


def _indented_size(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    lines = str(text).count("\n") + 1
    return size_of(text) + lines * (len(width) if isinstance(width, str) else width)


def _joined_size(items: list[Any], d: object = "", attribute: object = None) -> int:
    return size_of(items) + len(items) * len(str(d))


def _summed_size(items: object, attribute: object = None, start: float = 0) -> int:
    if not isinstance(start, (int, float)):
        raise TemplateError("in a chat template, sum() is for numbers only")
    return 1


def _json_size(value: object, ensure_ascii: bool = False, indent: int | None = None, **layout: object) -> int:
    return size_of(value) * (1 + (indent or 0) * _depth(value))


def _depth(value: object, level: int = 0) -> int:
    if level > _MAX_JSON_DEPTH:
        raise TemplateError(f"the chat template nests JSON deeper than {_MAX_JSON_DEPTH} levels")
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return max((_depth(item, level + 1) for item in inner), default=level)


def _width(value: object, *arguments: object, **named: object) -> int:
    return max((given for given in (*arguments, *named.values()) if isinstance(given, int)), default=0)


SIZE_BEFORE: dict[str, Callable[..., int]] = {
    "replace": _replaced_size,
    "join": _joined_size,
    "indent": _indented_size,
    "format": _formatted_size,
    "sum": _summed_size,
    "tojson": _json_size,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice", "round"), _width),
}
"""An upper bound, from its operands, of what a string method or a filter of this name makes."""
