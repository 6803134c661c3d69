"""What the parts of a step cost, learned from past steps, robust to those that were disturbed."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from mvllm.core.types import ceil_div

WINDOW = 16  # latest samples kept of each kind of step
TOKEN_SLOPE = 0.04  # of a plain step's time, for each token more, before any such step was seen
TRUSTED = 2  # samples of the drafter's cost before it is believed
CLIP = 2.0  # a sample counts as at most so many times what was expected
EXACT_BITS = 5  # steps of up to 2**5 - 1 tokens are told apart exactly
SMALL_CATCH_UP = 16  # tokens of a row that count as part of an ordinary pass


class _Samples:
    """The latest values, and their lower quartile: a disturbed step only ever takes longer."""

    __slots__ = ("_values", "low")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.low = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.low = sorted(self._values)[len(self._values) // 4]

    @property
    def hoped(self) -> float:
        """`low`, less while there are few values: a first pass is slow by itself, with memory never touched
        before, and whoever believes it never makes a second one."""
        return self.low * min(1.0, len(self._values) / TRUSTED)


class ForwardCurve:
    """Seconds of a forward as a function of its tokens, for about the same number of rows."""

    def __init__(self) -> None:
        self._samples: dict[int, _Samples] = {}
        self._tokens: list[int] = []  # ascending
        self._seconds: list[float] = []  # of `_tokens`, never falling

    def add(self, tokens: int, seconds: float) -> None:
        tokens = _rounded(tokens)
        expected = self.seconds(tokens)
        if expected > 0.0:
            seconds = min(seconds, CLIP * expected)
        self._samples.setdefault(tokens, _Samples()).add(seconds)
        self._tokens = sorted(self._samples)
        lows = [self._samples[tokens].low for tokens in reversed(self._tokens)]
        self._seconds = list(accumulate(lows, min))[::-1]

    @property
    def is_known(self) -> bool:
        """Whether steps of different lengths were seen: before that, what a token more costs is a guess."""
        return len(self._tokens) > 1

    def seconds(self, tokens: float) -> float:
        """Interpolated between what was measured, extended beyond it; 0 if nothing was."""
        if not self._tokens:
            return 0.0
        index = bisect_right(self._tokens, tokens)
        if index == 0:
            return self._seconds[0]
        distance = tokens - self._tokens[index - 1]
        if index == len(self._tokens):
            return self._seconds[-1] + distance * self._slope()
        width = self._tokens[index] - self._tokens[index - 1]
        rise = self._seconds[index] - self._seconds[index - 1]
        return self._seconds[index - 1] + distance / width * rise

    def _slope(self) -> float:
        """Seconds per token beyond the longest step seen."""
        if len(self._tokens) == 1:
            return TOKEN_SLOPE * self._seconds[0]
        return (self._seconds[-1] - self._seconds[0]) / (self._tokens[-1] - self._tokens[0])


def _rounded(tokens: int) -> int:
    """Long steps share samples with those nearly as long: within an eighth or so."""
    step = 1 << max(0, tokens.bit_length() - EXACT_BITS)
    return (tokens + step // 2) // step * step


def row_group(rows: int) -> int:
    """Steps with 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ... rows share what is learned of their cost."""
    step = 1 << max(0, (rows - 1).bit_length() - 2)
    return ceil_div(rows, step) * step


_UNKNOWN = ForwardCurve()


class ForwardCosts:
    """Seconds of the target's forward, for steps without prefill."""

    def __init__(self) -> None:
        self._curves: dict[int, ForwardCurve] = {}

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        self._curves.setdefault(row_group(rows), ForwardCurve()).add(tokens, seconds)

    def curve(self, rows: int) -> ForwardCurve:
        """For steps with `rows` rows."""
        return self._curves.get(row_group(rows), _UNKNOWN)

    def seconds(self, rows: int, tokens: float) -> float:
        """Of a step with `rows` rows and `tokens` tokens in all; 0 if no step like it was seen."""
        return self.curve(rows).seconds(tokens)


class DraftCosts:
    """Seconds of the drafter: passes, each of which gives some rows one draft, and catching up with tokens
    that it has not seen."""

    def __init__(self) -> None:
        self._passes: dict[int, _Samples] = {}
        self._catch_ups: deque[tuple[int, int, int, float]] = deque(maxlen=WINDOW)

    def add_passes(self, rows: int, passes: int, seconds: float) -> None:
        """A step in which `rows` rows got up to `passes` drafts."""
        if passes > 0:
            self._passes.setdefault(row_group(rows), _Samples()).add(seconds / passes)

    def add_catch_up(self, tokens: int, rows: int, passes: int, seconds: float) -> None:
        """`tokens` tokens that the drafter had not seen, and `passes` passes over `rows` rows after them."""
        self._catch_ups.append((tokens, rows, passes, seconds))

    @property
    def known(self) -> bool:
        return bool(self._passes)

    def pass_seconds(self, rows: int) -> float:
        """Of one pass over `rows` rows: as measured for the number of rows nearest to it; 0 if unknown."""
        group = row_group(rows)
        samples = self._passes.get(group)
        if samples is None:
            if not self._passes:
                return 0.0
            samples = self._passes[min(self._passes, key=lambda other: (abs(other - group), other))]
        return samples.hoped

    def pass_table(self, rows: int) -> list[float]:
        """Seconds of passes over 0, 1, ..., `rows` rows, never falling."""
        return list(accumulate([0.0, *[self.pass_seconds(count) for count in range(1, rows + 1)]], max))

    def catch_up_seconds(self) -> float:
        """Of catching up with one token; 0 if unknown."""
        if not self._catch_ups or not self._passes:
            return 0.0
        rates = [
            max(0.0, seconds - passes * self.pass_seconds(rows)) / tokens
            for tokens, rows, passes, seconds in self._catch_ups
        ]
        return sorted(rates)[len(rates) // 4]
