"""How likely drafts are to be accepted: learned from what became of earlier ones.

The log-odds that the target accepts the draft at some position of a round, given that it accepted those
before it, are modelled as a sum: a term that all requests share, for the position (and, at the first one, for
whether the request's last round was accepted whole), plus the request's own rating. N-gram drafts need the
first term: a copy runs long or fails at once. The rating follows the text.

Both are tracked by an extended Kalman filter with variances alone, as Glicko rates players (M. E. Glickman,
"Parameter estimation in large dynamic paired comparison experiments", Applied Statistics 48, 1999): what is
uncertain moves far with one outcome, and uncertainty grows with time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mvllm.core.spec.draft_length import DraftResult
from mvllm.core.types import RequestId

START_LOG_ODDS = 0.85  # a probability of 0.7, before anything is known
CELL_VARIANCE = 1.0
CELL_DRIFT = 0.001  # variance a shared term gains with each outcome
RATING_VARIANCE = 1.0  # of a new request: how much requests differ
RATING_DRIFT = 0.005  # variance a rating gains with each step of its request: how fast text changes
MAX_VARIANCE = 2.0
SURPRISE_BELOW = 0.15  # a round this unlikely suggests that the text has changed
SURPRISE_VARIANCE = 0.2  # and adds so much
OPTIMISM = 0.35  # standard deviations of a rating that count in its favour
MAX_LOG_ODDS = 4.5  # a probability of 0.99
POPULATION_WEIGHT = 0.25  # of an ended request in the rating that new ones start from

POSITION_BUCKETS = (0, 1, 2, 2, 3, 3, 3, 3)  # of positions 0 to 7; later ones: 4
NUM_BUCKETS = 5


def position_bucket(position: int) -> int:
    """Positions 1, 2, 3-4, 5-8 and the rest of a round (here counted from 0) share an estimate each."""
    return POSITION_BUCKETS[position] if position < len(POSITION_BUCKETS) else NUM_BUCKETS - 1


@dataclass(slots=True)
class _Estimate:
    mean: float
    variance: float


@dataclass(slots=True)
class _Rating:
    """A request's own term."""

    mean: float
    variance: float
    hot: bool = False  # whether its last round was accepted whole


class AcceptanceModel:
    """Owns the shared terms and the ratings of live requests."""

    def __init__(self) -> None:
        later = [_Estimate(START_LOG_ODDS, CELL_VARIANCE) for _ in range(NUM_BUCKETS - 1)]
        self._cells = {hot: [_Estimate(START_LOG_ODDS, CELL_VARIANCE), *later] for hot in (False, True)}
        self._population = 0.0
        self._ratings: dict[RequestId, _Rating] = {}

    def survival(self, id: RequestId, length: int) -> list[float]:
        """Probabilities that the first 1, 2, ..., `length` drafts are all accepted.

        They are on the bright side by as much as is uncertain of the request: drafting is how to find out,
        and a request that was left alone for a while has another chance.
        """
        rating = self._rating(id)
        own = rating.mean + OPTIMISM * math.sqrt(rating.variance)
        chances = [_probability(cell.mean + own) for cell in self._cells[rating.hot]]
        result, alive = [], 1.0
        for position in range(length):
            alive *= chances[position_bucket(position)]
            result.append(alive)
        return result

    def variance(self, id: RequestId) -> float:
        """Of the request's own term: how uncertain its chances are."""
        return self._rating(id).variance

    def observe(self, results: Iterable[DraftResult]) -> None:
        """Learn from live rows of a step; those without drafts become less certain."""
        for result in results:
            rating = self._ratings[result.id] = self._rating(result.id)
            if result.proposed > 0:
                if self._surprises(result):
                    rating.variance += SURPRISE_VARIANCE
                self._learn(rating, result)
            rating.variance = min(rating.variance + RATING_DRIFT, MAX_VARIANCE)

    def _rating(self, id: RequestId) -> _Rating:
        """The request's own term; a new one, which is not kept, if nothing is known of it."""
        return self._ratings.get(id) or _Rating(self._population, RATING_VARIANCE)

    def _surprises(self, result: DraftResult) -> bool:
        alive = self.survival(result.id, result.proposed)
        at_least = alive[result.accepted - 1] if result.accepted > 0 else 1.0
        at_most = 1.0 - alive[result.accepted] if result.accepted < result.proposed else 1.0
        return min(at_least, at_most) < SURPRISE_BELOW

    def _learn(self, rating: _Rating, result: DraftResult) -> None:
        cells = self._cells[rating.hot]
        for position in range(min(result.accepted + 1, result.proposed)):
            cell = cells[position_bucket(position)]
            chance = _probability(cell.mean + rating.mean)
            information = chance * (1.0 - chance)
            step = (float(position < result.accepted) - chance) / (
                1.0 + information * (cell.variance + rating.variance)
            )
            cell.mean += cell.variance * step
            rating.mean += rating.variance * step
            cell.variance = cell.variance / (1.0 + information * cell.variance) + CELL_DRIFT
            rating.variance /= 1.0 + information * rating.variance
        rating.hot = result.accepted == result.proposed

    def release(self, id: RequestId) -> None:
        """Forget a request; what is certain about it stays as where new ones start."""
        rating = self._ratings.pop(id, None)
        if rating is not None:
            certainty = max(0.0, 1.0 - rating.variance / RATING_VARIANCE)
            self._population += POPULATION_WEIGHT * certainty * (rating.mean - self._population)


def _probability(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)))
