"""What the parts of a step cost, learned from past steps, robust to those that were disturbed."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from mvllm.core.types import ceil_div

WINDOW = 16  # latest samples kept of each kind of step
TOKEN_SLOPE = 0.04  # of a plain step's time, for each token more, before any such step was seen
TELLING_SHARE = 0.25  # drafts for each row, from which on a step tells what a token more costs
TRUSTED = 2  # samples of the drafter's cost before it is believed
LATER_SHARE = 0.75  # of a round's first pass, that one more takes, before any such round was seen
FORGET_AFTER = 160  # steps without a sample of a kind, that what is known of it still counts
CLIP = 2.0  # a sample counts as at most so many times what was expected
EXACT_BITS = 5  # steps of up to 2**5 - 1 tokens are told apart exactly
SMALL_CATCH_UP = 16  # tokens of a row that count as part of an ordinary pass


class _Samples:
    """The latest values, and their lower quartile: a disturbed step only ever takes longer. Of few values it
    is the second, for the lowest of a noisy few is too good to be true."""

    __slots__ = ("_values", "low", "step")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.low = 0.0
        self.step = 0  # in which the last one came

    def add(self, value: float, step: int) -> None:
        self._values.append(value)
        count = len(self._values)
        self.low = sorted(self._values)[max(count // 4, min(count - 1, 1))]
        self.step = step

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def cautious(self) -> float:
        """The lower quartile, but the lowest of few."""
        return min(self._values) if self.count < WINDOW // 4 else self.low

    @property
    def hoped(self) -> float:
        """`cautious`, less while there are few values: a first pass is slow by itself, with memory never
        touched before, and whoever believes it never makes a second one."""
        return self.cautious * min(1.0, len(self._values) / TRUSTED)


class ForwardCurve:
    """Seconds of a forward as a function of its tokens, for about the same number of rows.

    Machines are faster and slower by turns. So a length that was seen in a slow minute, and not used since,
    has to be forgotten, or it would never be tried again.

    Args:
        is_hopeful: of few steps with drafts the quickest counts, as of those without. With a single row one
            slow beginning would end what may gain most; with many rows lucky ones cost more than they bring.
    """

    def __init__(self, *, is_hopeful: bool = False) -> None:
        self._is_hopeful = is_hopeful
        self._num_steps = 0
        self._plain: dict[int, _Samples] = {}  # steps without drafts, by tokens
        self._drafted: dict[int, _Samples] = {}  # and those with some
        self._num_drafts: dict[int, int] = {}  # of the latter, the most in one step
        self._tokens: list[int] = []  # ascending
        self._seconds: list[float] = []  # of `_tokens`, never falling

    def add(self, tokens: int, seconds: float, *, num_drafts: int) -> None:
        tokens = _rounded(tokens)
        expected = self.seconds(tokens)
        if expected > 0.0:
            seconds = min(seconds, CLIP * expected)
            if self.is_known and tokens not in self._tokens and tokens < self._tokens[-1]:
                # A first step of its length may be slow by itself, and whoever believes it takes no second.
                # What was expected of a longer one is less certain than what it took.
                seconds = min(seconds, (seconds + expected) / 2)
        self._num_steps += 1
        kind = self._drafted if num_drafts > 0 else self._plain
        kind.setdefault(tokens, _Samples()).add(seconds, self._num_steps)
        if num_drafts > 0:
            self._num_drafts[tokens] = max(num_drafts, self._num_drafts.get(tokens, 0))
        for length in [length for length, samples in self._plain.items() if self._is_forgotten(samples)]:
            del self._plain[length]
        for length in [length for length, samples in self._drafted.items() if self._is_forgotten(samples)]:
            del self._drafted[length], self._num_drafts[length]
        self._tokens = sorted(self._plain.keys() | self._drafted.keys())
        lows = [self._low(tokens) for tokens in reversed(self._tokens)]
        self._seconds = list(accumulate(lows, min))[::-1]

    def _low(self, tokens: int) -> float:
        plain = self._plain.get(tokens)
        if plain is not None:
            return plain.cautious  # drafts must not look good because these were disturbed
        drafted = self._drafted[tokens]
        return drafted.cautious if self._is_hopeful else drafted.low

    def _is_forgotten(self, samples: _Samples) -> bool:
        return samples.step <= self._num_steps - FORGET_AFTER

    @property
    def is_known(self) -> bool:
        """Whether steps with drafts were seen: before that, what a token more costs is a guess. Steps with
        one row more don't tell, for they take nearly the same."""
        return self.most_drafts > 0

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

    @property
    def num_plain(self) -> int:
        """Steps without drafts whose times are remembered."""
        return sum([samples.count for samples in self._plain.values()])

    @property
    def most_drafts(self) -> int:
        """Of a step that is remembered."""
        return max(self._num_drafts.values(), default=0)

    def _slope(self) -> float:
        """Seconds per token beyond the longest step seen. A few drafts beside many rows don't tell; then at
        least half of what a token takes on average."""
        shortest, longest, first = self._tokens[0], self._tokens[-1], self._seconds[0]
        if not self.is_known:
            return TOKEN_SLOPE * first
        slope = (self._seconds[-1] - first) / (longest - shortest) if longest > shortest else 0.0
        tells = any(n >= TELLING_SHARE * (tokens - n) for tokens, n in self._num_drafts.items())
        return slope if tells and longest > shortest else max(slope, first / shortest / 2)


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
        group = row_group(rows)
        curve = self._curves.get(group)
        if curve is None:
            curve = self._curves[group] = ForwardCurve(is_hopeful=rows == 1)
        curve.add(tokens, seconds, num_drafts=tokens - rows)

    def curve(self, rows: int) -> ForwardCurve:
        """For steps with `rows` rows."""
        return self._curves.get(row_group(rows), _UNKNOWN)

    def seconds(self, rows: int, tokens: float) -> float:
        """Of a step with `rows` rows and `tokens` tokens in all; 0 if no step like it was seen."""
        return self.curve(rows).seconds(tokens)


class DraftCosts:
    """Seconds of the drafter: rounds of passes, each of which gives some rows one draft, and catching up with
    tokens that it has not seen.

    The first pass of a round takes longer than those after it: it also reads what the last verification left
    behind, and wakes up the drafter's threads. It is measured in rounds of a single pass, later ones in
    longer rounds; what was not for long is forgotten, as in `ForwardCurve`.
    """

    def __init__(self) -> None:
        self._first: dict[int, _Samples] = {}  # by group of rows
        self._later: dict[int, _Samples] = {}
        self._num_rounds: dict[int, int] = {}
        self._catch_ups: deque[tuple[int, int, int, float]] = deque(maxlen=WINDOW)
        self._catch_up_seconds: float | None = None  # of a token; None: to be computed

    def add_round(self, rows: int, passes: int, seconds: float) -> None:
        """A step in which `rows` rows got up to `passes` drafts."""
        if passes == 0:
            return
        self._catch_up_seconds = None
        group = row_group(rows)
        number = self._num_rounds[group] = self._num_rounds.get(group, 0) + 1
        first, later = self._first.get(group), self._later.get(group)
        if first is None or first.step <= number - FORGET_AFTER:
            first = self._first[group] = _Samples()
        if passes == 1 or first.count < TRUSTED:
            first.add(seconds / passes, number)
        else:
            later = self._later.setdefault(group, _Samples())
            later.add(max(0.0, seconds - first.low) / (passes - 1), number)
        if later is not None and later.step <= number - FORGET_AFTER:
            del self._later[group]

    def add_catch_up(self, tokens: int, rows: int, passes: int, seconds: float) -> None:
        """`tokens` tokens that the drafter had not seen, and `passes` passes over `rows` rows after them."""
        self._catch_ups.append((tokens, rows, passes, seconds))
        self._catch_up_seconds = None

    @property
    def known(self) -> bool:
        return bool(self._first)

    def pass_seconds(self, rows: int, place: int) -> float:
        """Of pass number `place`, from 0, of a round over `rows` rows: as measured for the number of rows
        nearest to it; 0 if nothing is known."""
        if not self._first:
            return 0.0
        first, group = _nearest(self._first, rows), row_group(rows)
        if place == 0:
            return first.hoped
        if self._later and (group in self._later or group not in self._first):
            # Later ones that seem to take longer than the first were disturbed.
            return min(first.cautious, _nearest(self._later, rows).hoped)
        return LATER_SHARE * first.hoped

    def round_seconds(self, rows: int, passes: int) -> float:
        """Of a round of so many passes over `rows` rows."""
        if passes == 0:
            return 0.0
        return self.pass_seconds(rows, 0) + (passes - 1) * self.pass_seconds(rows, 1)

    def pass_table(self, rows: int, place: int) -> list[float]:
        """Seconds of passes number `place` over 0, 1, ..., `rows` rows, never falling."""
        counts = range(1, rows + 1)
        return list(accumulate([0.0, *[self.pass_seconds(count, place) for count in counts]], max))

    @property
    def knows_catch_up(self) -> bool:
        return bool(self._catch_ups and self._first)

    def catch_up_seconds(self) -> float:
        """Of catching up with one token; 0 if unknown."""
        if self._catch_up_seconds is None:
            rates = [
                max(0.0, seconds - self.round_seconds(rows, passes)) / tokens
                for tokens, rows, passes, seconds in self._catch_ups
            ]
            self._catch_up_seconds = sorted(rates)[len(rates) // 4] if self.knows_catch_up else 0.0
        return self._catch_up_seconds


def _nearest(samples: dict[int, _Samples], rows: int) -> _Samples:
    """Those of the group of rows nearest to that of `rows`."""
    group = row_group(rows)
    return samples[min(samples, key=lambda other: (abs(other - group), other))]
