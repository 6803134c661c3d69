"""The draft lengths that give the most tokens per second, as far as past steps tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import itemgetter, mul

from mvllm.core.spec.acceptance import AcceptanceModel
from mvllm.core.spec.draft_length import (
    DraftDemand,
    DraftLengthPolicy,
    DraftResult,
    SpeculationStep,
)
from mvllm.core.spec.step_costs import (
    CLIP,
    FORGET_AFTER,
    SMALL_CATCH_UP,
    DraftCosts,
    ForwardCosts,
    row_group,
)
from mvllm.core.types import RequestId

DEFAULT_ADAPTIVE_MAX = 16
FIRST_SAVINGS = 5.0  # tokens: what trying out a new drafter may lose
TRIAL_SHARE = 0.006  # of the tokens, that trials may lose from then on
MAX_SAVINGS = 16.0  # tokens, for each row
HOPE = 0.85  # chance of acceptance at which drafting has to pay for a trial to make sense
TRIAL_AFTER = 48  # output tokens, before a drafter reads for a trial: how a text begins tells little of it
LONGEST_WAIT = 256  # steps without a row as long as that and far from its end, before shorter ones are tried
TRIAL_READING = 0.25  # of the time of the output that may follow, that reading for a trial may take
FIRST_TRIAL = 2  # drafts, as long as nothing is known of the drafter's cost
MAX_TRIAL = 4  # drafts
LARGEST_GROWTH = 8  # times the drafts of the largest step that was measured
PLAIN_FIRST = 2  # steps without drafts that are timed before there are any
PLAIN_SURE = 8  # such steps, before their time counts as known: until then, more of them come the sooner
PLAIN_SHARE = 0.004  # of the time, that they may lose from then on
GUESSED_CATCH_UP = 1 / 32  # of a plain step's time, for each token, before a drafter has read any ...
MOST_GUESSED = MAX_SAVINGS / 2  # ... and so many steps at most, for it has to be saved for a trial
CATCH_UP_ROUNDS = 64  # rounds of drafting at most over which the cost of catching up has to come back
PROPOSING_WEIGHT = 0.1  # of the last round in the share of rounds in which the drafter had a proposal
PROPOSING_DRIFT = 0.01  # back to 1, for each step in which the row was not asked to draft
READ_HOPE = 0.7  # of wrong drafts: as many are hoped to become right if the drafter has read everything
READ_SHARE = 0.7  # of the time that this would save, that reading may take
READ_HORIZON = 2  # tokens at most that are expected to come, for each one there is
LEAST_ACCEPTED = 24  # drafts of a row, before its drafter reads everything ...
LEAST_RIGHT = 0.65  # ... and share of its rounds whose first draft was accepted
LEAST_RETURN = 1.08  # times the tokens of steps without drafts, that drafts have to bring in the same time
LEAST_SURVIVAL = 0.02  # drafts less likely to be accepted than this are not considered
SURE_LENGTH = 7  # drafts of a row whose drafter stops by itself: a ninth token often takes a pass of its own
MOST_SURE = 0.95  # is enough to go on
OPINION_WEIGHT = 0.05  # of the last round in what is learned of a drafter's opinions
OPINION_DRIFT = 0.001  # back to trusting them, for each step that tells nothing


@dataclass(slots=True)
class _Row:
    """What the policy keeps of a request."""

    num_behind: int = 0  # tokens the drafter has to read before it can draft
    is_at_hand: bool = False  # at hand, in the step under way
    asked: int = 0  # drafts allowed in the step under way
    # Tokens that drafts have brought beyond their cost, and may lose again; by whether these were at hand.
    earned: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((False, True), 0.0))
    num_accepted: int = 0  # drafts so far
    num_rounds: int = 0  # with drafts, so far
    num_right: int = 0  # of them, those whose first draft was accepted
    num_new: int = 0  # output tokens of steps without drafts at hand ...
    num_copied: int = 0  # ... and of steps with them
    told_to_read: bool = False  # all of its tokens; at most once
    is_reading: bool = False  # the drafter is on its way through them
    proposing: float = 1.0  # share of rounds in which the drafter used the permission


@dataclass(slots=True)
class _Share:
    """Learned quickly at first, then from about the last twenty rounds; a start counts as one of them."""

    start: float
    value: float = field(init=False)
    num_seen: int = 1

    def __post_init__(self) -> None:
        self.value = self.start

    def learn(self, share: float) -> None:
        self.num_seen += 1
        self.value += max(OPINION_WEIGHT, 1.0 / self.num_seen) * (share - self.value)

    def forget(self) -> None:
        self.value += OPINION_DRIFT * (self.start - self.value)


class AdaptiveLength(DraftLengthPolicy):
    """Maximises expected tokens per expected second over the whole batch.

    The drafts of all rows, most likely to be accepted first, are added to the step while the
    ratio of tokens to seconds rises; rows for which that says 0 draft nothing, and cost nothing. Costs of
    forwards, of draft passes and of catching up with unseen tokens are measured; so are chances of
    acceptance (`acceptance.py`).

    Estimates err, and a batch that keeps the processor busy has little to gain. So drafts have to bring
    `LEAST_RETURN` times what steps without any give in the same time, and such steps are timed now and then,
    the more often the less drafting is expected to gain.

    A row that seems not to pay is tried all the same as long as what a trial would lose, should every
    draft be wrong, is covered: by what the row's own drafts have brought, or by savings that all rows
    share. These are a few tokens' time for a new drafter, so that a bad beginning is not the end, and
    from then on a small share of all time. What drafts bring and take is booked after every step, in
    tokens. So drafting that never pays loses `FIRST_SAVINGS` tokens and `TRIAL_SHARE` of the time, besides
    what the drafter takes to begin with; what that may be is guessed and has to be covered beforehand.

    For a row whose drafter has to read first, a trial waits for `TRIAL_AFTER` tokens of output: the beginning
    of an answer tells little of it.

    A drafter that begins with the end of a text alone is told to read all of it once some of the row's drafts
    were accepted, and most rounds began with a right one, if reading takes less than what better drafts are
    hoped to save.

    Where a single row drafts, a drafter with an opinion of its drafts is told how likely they have to be
    right for another one to pay, and may go on as long as they are: if those after a first one were accepted
    as often as that, and those at which it stopped were not.

    All of this holds for drafts that the drafter has at hand and for those it works out apart: each kind has
    chances, trials and savings of its own.

    Args:
        max_length: most drafts of a row.
    """

    def __init__(self, max_length: int = DEFAULT_ADAPTIVE_MAX) -> None:
        self._max_length = max_length
        # By whether a row has drafts at hand: to draft what is copied and what is new are two things.
        self._acceptance = {is_at_hand: AcceptanceModel() for is_at_hand in (False, True)}
        self._savings = dict.fromkeys((False, True), FIRST_SAVINGS)  # tokens that trials may lose now
        self._forward = ForwardCosts()
        self._draft = DraftCosts()
        self._rows: dict[RequestId, _Row] = {}
        self._catching_up = 0.0  # seconds spent for rows that have had no draft since
        self._since_plain: dict[int, int] = {}  # by group of rows: steps with drafts since one without
        self._readers: frozenset[RequestId] = frozenset()
        self._has_seen_copies = False  # drafts at hand
        self._least_confidence = 0.0  # for the step under way
        # Of worked-out drafts after a round's first, those that were accepted; and of rounds that the drafter
        # ended by its own opinion, those whose drafts all were.
        self._later_right, self._stopped_right = _Share(1.0), _Share(0.0)
        self._waited = 0  # steps in which no row was fit for a trial of a drafter that reads

    # --- decide ------------------------------------------------------------------------------------------

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        for demand in rows:
            row = self._rows.setdefault(demand.id, _Row())
            row.num_behind, row.is_at_hand, row.asked = demand.num_behind, demand.num_at_hand > 0, 0
            if row.is_reading and demand.num_unread > 0:  # the drafter could not begin then
                row.told_to_read = row.is_reading = False
            row.is_reading &= row.num_behind > SMALL_CATCH_UP
        self._has_seen_copies |= any(row.is_at_hand for row in self._rows.values())
        self._readers, self._least_confidence = frozenset(), 0.0
        num_rows = len(rows)
        curve = self._forward.curve(num_rows)
        if curve.num_plain >= PLAIN_FIRST and curve.seconds(num_rows) > 0.0:
            for id, length in self._choose(rows, num_rows).items():
                self._rows[id].asked = length
        return [self._rows[demand.id].asked for demand in rows]

    def _choose(self, rows: Sequence[DraftDemand], num_rows: int) -> dict[RequestId, int]:
        """Lengths above 0: the best ones, and a trial. Appoints a reader."""
        chosen: dict[RequestId, int] = {}
        num_tokens = num_rows
        # Until it is known what drafts cost, they are tried with one row.
        if self._forward.curve(num_rows).is_known:
            chosen, rate = self._best_of(rows, num_rows)
            if chosen and self._is_plain_due(num_rows, rate):
                return {}
            self._readers = self._choose_reader([row for row in rows if row.id in chosen], num_rows)
            num_tokens += sum(chosen.values())
            self._let_go_on(chosen, rows, num_rows, rate)
        for demand in rows:
            row = self._rows[demand.id]
            if demand.id in self._readers:
                row.told_to_read = row.is_reading = True
            elif row.is_reading and demand.limit > 0 and not row.is_at_hand:
                chosen.setdefault(demand.id, 1)
        is_ripe = any(row.num_output >= TRIAL_AFTER and self._pays_back(row, num_rows) for row in rows)
        self._waited = 0 if is_ripe else self._waited + 1
        idle = [demand for demand in rows if demand.id not in chosen and self._may_be_tried(demand, num_rows)]
        for of_kind in filter(None, _by_kind(idle)):
            if trial := self._affordable_trial(of_kind, num_rows, num_tokens):
                return chosen | trial
        return chosen

    def readers(self) -> frozenset[RequestId]:
        return self._readers

    def least_confidence(self) -> float:
        return self._least_confidence

    def _let_go_on(
        self, chosen: dict[RequestId, int], rows: Sequence[DraftDemand], num_rows: int, rate: float
    ) -> None:
        """If one row alone drafts, with a drafter that knows when to stop: say how likely its drafts have to
        be right for another one to pay at `rate` tokens per second, and lengthen what is `chosen`.

        A pass for several rows takes little more than for the last one that goes on.
        """
        working = [demand for demand in rows if demand.id in chosen and demand.num_at_hand == 0]
        if len(working) != 1 or not working[0].heeds_confidence:
            return
        [demand] = working
        # A token more takes the longer, the more there are: the mean of the second to the fifth draft.
        forward = self._forward.curve(num_rows)
        more = (forward.seconds(num_rows + 5) - forward.seconds(num_rows + 1)) / 4
        needed = rate * (self._draft.pass_seconds(1, 1) + more)
        if self._stopped_right.value >= needed:
            return
        # The next draft has to be right too, which is about as likely as of a first one.
        self._least_confidence = min(needed / self._survival(demand)[0], MOST_SURE)
        spare = self._most_drafts(num_rows) - sum(chosen.values())
        if self._later_right.value >= needed and spare > 0:
            length = chosen[demand.id]
            chosen[demand.id] = max(length, min(length + spare, SURE_LENGTH, self._cap(demand)))

    def _is_plain_due(self, num_rows: int, rate: float) -> bool:
        """Whether it is time to see again what a step without drafts takes: the less drafts are expected to
        gain, the sooner, for then the more depends on it, and a look costs the less."""
        curve, since_plain = self._forward.curve(num_rows), self._since_plain.get(row_group(num_rows), 0)
        lost = 1.0 - num_rows / curve.seconds(num_rows) / rate  # of a step
        certainty = min(1.0, curve.num_plain / PLAIN_SURE)
        return since_plain * PLAIN_SHARE >= certainty * lost or since_plain + 1 >= FORGET_AFTER

    def _best_of(self, rows: Sequence[DraftDemand], num_rows: int) -> tuple[dict[RequestId, int], float]:
        """The best lengths of all rows whose drafts have a known price, or of those with drafts at hand
        alone: a slow drafter must not keep these from being used. And the tokens per second expected."""
        at_hand, others = _by_kind(rows)
        candidates: list[Sequence[DraftDemand]] = [at_hand]
        if self._draft.known and others:
            candidates.append([*at_hand, *self._admit(others, num_rows)])
        plans = [
            self._plan(
                some, [self._survival(demand) for demand in some], num_rows, self._most_drafts(num_rows)
            )
            for some in candidates
        ]
        return max(plans, key=itemgetter(1))

    def _admit(self, rows: Sequence[DraftDemand], num_rows: int) -> list[DraftDemand]:
        """Not more rows than their drafter can catch up with while a step is computed, for all others wait;
        but the most promising one in any case."""
        near = [demand for demand in rows if demand.num_behind <= SMALL_CATCH_UP]
        far = [demand for demand in rows if demand.num_behind > SMALL_CATCH_UP and demand.limit > 0]
        far.sort(key=lambda demand: self._survival(demand)[0], reverse=True)
        ends = accumulate(self._reading_seconds(demand, num_rows) for demand in far)
        step = self._forward.seconds(num_rows, num_rows)
        return near + far[: max(1, sum(end <= step for end in ends))]

    def _choose_reader(self, drafting: Sequence[DraftDemand], num_rows: int) -> frozenset[RequestId]:
        """At most one row, and none while a drafter reads: it can do so for one at a time."""
        if any(row.is_reading for row in self._rows.values()):
            return frozenset()
        worth = (demand.id for demand in drafting if self._is_worth_reading(demand, num_rows))
        return frozenset(islice(worth, 1))

    def _is_worth_reading(self, demand: DraftDemand, num_rows: int) -> bool:
        """Whether the drafter should read all of a row's tokens, what it has read once more."""
        row, catch_up = self._rows[demand.id], self._draft.catch_up_seconds()
        is_good = row.num_accepted >= LEAST_ACCEPTED and row.num_right >= LEAST_RIGHT * row.num_rounds
        may_read = demand.num_unread > 0 and not row.told_to_read and not row.is_at_hand
        if not may_read or not is_good or catch_up <= 0.0:
            return False
        to_come: float = num_rows * min(demand.num_left, READ_HORIZON * demand.num_output)
        to_come *= row.num_new / (row.num_new + row.num_copied)  # as so far
        present = self._survival(demand)
        # A good minute says little of the whole text that is to come.
        right = min(present[0], row.num_right / row.num_rounds)
        chances = (present, self._hope(demand, right + READ_HOPE * (1.0 - right)))
        now, hoped = [to_come / self._plan([demand], [each], num_rows)[1] for each in chances]
        return catch_up * demand.num_tokens <= READ_SHARE * (now - hoped)

    def _survival(self, demand: DraftDemand) -> list[float]:
        return self._acceptance[demand.num_at_hand > 0].survival(demand.id, self._cap(demand))

    def _hope(self, demand: DraftDemand, chance: float) -> list[float]:
        """Chances of survival if each draft has this one."""
        return list(accumulate([chance] * self._cap(demand), mul))

    def _most_drafts(self, num_rows: int) -> int:
        """Of a step, all rows together: not many times more than any had that was measured, for nobody knows
        what they cost, and a few samples may say that they are free."""
        return FIRST_TRIAL + LARGEST_GROWTH * self._forward.curve(num_rows).most_drafts

    def _cap(self, demand: DraftDemand) -> int:
        return min(self._max_length, demand.limit)

    def _best(
        self, candidates: Sequence[DraftDemand], chances: Sequence[Sequence[float]], num_rows: int
    ) -> dict[RequestId, int]:
        """Lengths above 0 of the candidates in a step of `num_rows` decoding rows."""
        return self._plan(candidates, chances, num_rows)[0]

    def _plan(
        self,
        candidates: Sequence[DraftDemand],
        chances: Sequence[Sequence[float]],
        num_rows: int,
        most_drafts: int | None = None,
    ) -> tuple[dict[RequestId, int], float]:
        """Lengths above 0 of the candidates in a step of `num_rows` decoding rows, and the tokens per second
        that are expected of it; if there are none, those of a step without drafts.

        A draft can only be accepted after those before it, so each row's chances fall; merged by falling
        chance, every prefix of the list is the best choice of so many drafts.

        Args:
            chances: for each candidate, those that its first 1, 2, ... drafts are all accepted.
            most_drafts: of all candidates together; None: as many as pay.
        """
        offers = [
            (-chance, index, place)
            for index, alive in enumerate(chances)
            for place, chance in enumerate(alive)
            if chance > LEAST_SURVIVAL
        ]
        if len(candidates) > 1:
            offers.sort()
        offers = offers[:most_drafts]
        forward = self._forward.curve(num_rows)
        # A round's first pass, and one of those after it.
        passes = [self._draft.pass_table(len(candidates), place) for place in (0, 1)]
        tokens, expected, draft_seconds = float(num_rows), float(num_rows), 0.0
        plain_seconds = forward.seconds(num_rows)
        plain_rate = num_rows / plain_seconds
        best_rate, best_count = plain_rate, 0
        depths = [0] * self._max_length  # rows that draft at each place
        for count, (chance, index, place) in enumerate(offers):
            row = self._rows[candidates[index].id]
            if not row.is_at_hand:
                depth = depths[place] = depths[place] + 1
                table = passes[min(place, 1)]
                draft_seconds += table[depth] - table[depth - 1]
                if place == 0:
                    num_rounds = min(CATCH_UP_ROUNDS, 1 + candidates[index].num_left // 2)
                    draft_seconds += self._reading_seconds(candidates[index], num_rows) / num_rounds
            comes = 1.0 if row.is_at_hand else row.proposing
            tokens += comes
            expected -= chance * comes
            seconds = forward.seconds(tokens) + draft_seconds
            least = num_rows + LEAST_RETURN * plain_rate * (seconds - plain_seconds)
            if expected / seconds > best_rate and expected >= least:
                best_rate, best_count = expected / seconds, count + 1
            elif expected - chance * (len(offers) - count) < best_rate * seconds:
                break  # not even if all that follow were as likely, and free
        lengths: dict[RequestId, int] = {}
        for _, index, place in offers[:best_count]:
            lengths[candidates[index].id] = place + 1
        return lengths, best_rate

    def _may_be_tried(self, demand: DraftDemand, num_rows: int) -> bool:
        """Where the drafter would have to read, not at the beginning of an answer nor near its end."""
        if demand.num_at_hand > 0 or demand.num_behind <= SMALL_CATCH_UP:
            return demand.limit > 0
        is_typical = demand.num_output >= TRIAL_AFTER or self._waited >= LONGEST_WAIT
        return is_typical and self._pays_back(demand, num_rows)

    def _pays_back(self, demand: DraftDemand, num_rows: int) -> bool:
        """Whether enough may follow for reading to make sense."""
        to_come = demand.num_left * self._forward.seconds(num_rows, num_rows)
        return demand.limit > 0 and self._reading_seconds(demand, num_rows) <= TRIAL_READING * to_come

    def _affordable_trial(
        self, idle: Sequence[DraftDemand], num_rows: int, num_tokens: int
    ) -> dict[RequestId, int]:
        """Drafts for the row of which least is known, if they may pay and the savings cover their loss."""
        uncertain = max(idle, key=self._trial_value)
        hope = self._hope(uncertain, HOPE)
        if not self._forward.curve(num_rows).is_known:
            # Without knowing what drafts cost, nobody can say that they don't pay. Copies tell what forwards
            # cost for nothing; with several rows a model would first have to read, and often in vain.
            if num_rows > 1 and self._has_seen_copies and uncertain.num_at_hand == 0:
                return {}
        elif not self._best([uncertain], [hope], num_rows):
            return {}
        without = self._forward.seconds(num_rows, num_tokens)
        if uncertain.num_at_hand > 0:
            length = min(MAX_TRIAL, self._cap(uncertain))
            forward = self._forward.seconds(num_rows, num_tokens + length) - without
            return {uncertain.id: length} if self._is_affordable(uncertain, forward, num_rows) else {}
        reading = self._reading_seconds(uncertain, num_rows)
        each = self._draft.pass_seconds(1, 1) + self._forward.seconds(num_rows, num_tokens + 1) - without
        # A new drafter should tell more than what a single draft takes, a row that was expensive to read for
        # more than one outcome.
        length = FIRST_TRIAL
        if self._draft.known:
            length = 1 + int(reading / each) if each > 0.0 else 1
        length = min(length, MAX_TRIAL, self._cap(uncertain))
        forward = self._forward.seconds(num_rows, num_tokens + length) - without
        seconds = reading + self._draft.round_seconds(1, length) + forward
        return {uncertain.id: length} if self._is_affordable(uncertain, seconds, num_rows) else {}

    def _reading_seconds(self, demand: DraftDemand, num_rows: int) -> float:
        """Of the tokens that the drafter has to read for a row; guessed before it has read any."""
        if self._draft.knows_catch_up:
            return self._draft.catch_up_seconds() * demand.num_behind
        num_steps = min(GUESSED_CATCH_UP * demand.num_behind, MOST_GUESSED)
        return num_steps * self._forward.seconds(num_rows, num_rows)

    def _is_affordable(self, demand: DraftDemand, seconds: float, num_rows: int) -> bool:
        is_at_hand = demand.num_at_hand > 0
        available = self._savings[is_at_hand] + self._rows[demand.id].earned[is_at_hand]
        return self._in_tokens(seconds, num_rows) <= available

    def _in_tokens(self, seconds: float, num_rows: int) -> float:
        """Tokens that steps without drafts give in so many seconds. Such a step was measured."""
        return seconds * num_rows / self._forward.seconds(num_rows, num_rows)

    def _trial_value(self, demand: DraftDemand) -> tuple[float, float]:
        """Greatest for the row, of one kind, that a trial is to tell of."""
        if demand.num_at_hand > 0:
            return self._acceptance[True].variance(demand.id), 0.0
        proposing = self._rows[demand.id].proposing
        if not self._draft.known:
            return -demand.num_behind, proposing  # the same row twice shows a pass by itself
        return self._acceptance[False].variance(demand.id) * proposing, proposing

    # --- learn -------------------------------------------------------------------------------------------

    def observe(self, step: SpeculationStep) -> None:
        results = [result for result in step.results if result.id in self._rows]
        self._observe_forward(step)
        self._observe_drafts(step, results)
        self._account(step, results)
        self._observe_opinion(results)
        for is_at_hand, acceptance in self._acceptance.items():
            acceptance.observe([one for one in results if self._rows[one.id].is_at_hand == is_at_hand])
        for result in results:
            row = self._rows[result.id]
            if row.is_at_hand:
                row.num_copied += 1 + result.accepted
                continue
            row.num_new += 1 + result.accepted
            row.num_accepted += result.accepted
            row.num_rounds += result.proposed > 0
            row.num_right += result.accepted > 0
            if row.is_reading:
                continue
            if row.asked > 0:
                row.proposing += PROPOSING_WEIGHT * (float(result.proposed > 0) - row.proposing)
            else:
                row.proposing += PROPOSING_DRIFT * (1.0 - row.proposing)

    def _observe_forward(self, step: SpeculationStep) -> None:
        num_drafts = sum([result.proposed for result in step.results])
        if step.num_rows == len(step.results) and step.num_tokens == step.num_rows + num_drafts:
            self._forward.add(step.num_rows, step.num_tokens, step.forward_seconds)
            group = row_group(step.num_rows)
            is_plain = step.num_tokens == step.num_rows
            self._since_plain[group] = 0 if is_plain else self._since_plain.get(group, 0) + 1

    def _observe_drafts(self, step: SpeculationStep, results: Sequence[DraftResult]) -> None:
        rows = [(self._rows[result.id], result) for result in results]
        asked = [(row, result) for row, result in rows if row.asked > 0 and not row.is_at_hand]
        if not asked or any(row.is_reading for row, _ in asked):
            return  # reading is not told apart from drafting
        passes = max([result.proposed for _, result in asked])
        behind = [(row, result) for row, result in asked if row.num_behind > SMALL_CATCH_UP]
        caught_up = sum([row.num_behind for row, result in behind if result.proposed > 0])
        if caught_up:
            self._draft.add_catch_up(caught_up, len(asked), passes, self._catching_up + step.draft_seconds)
        elif not behind:
            self._draft.add_round(len(asked), passes, step.draft_seconds)
        # Several steps may pass before a row that was far behind gets its first draft.
        if behind and not caught_up:
            self._catching_up += step.draft_seconds - self._draft.round_seconds(len(asked), passes)
        else:
            self._catching_up = 0.0

    def _observe_opinion(self, results: Sequence[DraftResult]) -> None:
        """Whether the drafter was right to go on, and to stop."""
        rounds = [one for one in results if one.proposed > 0 and not self._rows[one.id].is_at_hand]
        later = [one for one in rounds if one.proposed > 1]
        if later:
            right = sum([max(0, one.accepted - 1) for one in later])
            self._later_right.learn(right / sum([one.proposed - 1 for one in later]))
        else:
            self._later_right.forget()
        stopped = [one for one in rounds if one.proposed < self._rows[one.id].asked]
        if stopped and self._least_confidence > 0.0:
            self._stopped_right.learn(sum([one.accepted == one.proposed for one in stopped]) / len(stopped))
        else:
            self._stopped_right.forget()

    def _account(self, step: SpeculationStep, results: Sequence[DraftResult]) -> None:
        """Book, in tokens, what each row's drafts have brought and taken beside a step without any."""
        num_rows = len(step.results)
        plain = self._forward.seconds(num_rows, num_rows)
        if plain <= 0.0:
            return
        for result in results:
            self._save(result, TRIAL_SHARE, num_rows)
        # What reading takes was weighed beforehand.
        rows = [(result, self._rows[result.id]) for result in results]
        asked = [result for result, row in rows if row.asked > 0 and (row.is_at_hand or not row.is_reading)]
        num_drafts = sum([result.proposed for result in asked])
        forward = self._forward.seconds(num_rows, num_rows + num_drafts) - plain
        working = [result for result in asked if not self._rows[result.id].is_at_hand]
        drafting = self._drafting_seconds(step, working) / max(len(working), 1)
        for result in asked:
            row = self._rows[result.id]
            seconds = forward * result.proposed / max(num_drafts, 1)
            if not row.is_at_hand:
                seconds += drafting
            earned = row.earned[row.is_at_hand] + result.accepted - self._in_tokens(seconds, num_rows)
            self._save(result, min(earned, 0.0), num_rows)
            row.earned[row.is_at_hand] = min(max(earned, 0.0), MAX_SAVINGS)

    def _save(self, result: DraftResult, tokens: float, num_rows: int) -> None:
        is_at_hand = self._rows[result.id].is_at_hand
        self._savings[is_at_hand] = min(self._savings[is_at_hand] + tokens, MAX_SAVINGS * num_rows)

    def _drafting_seconds(self, step: SpeculationStep, asked: Sequence[DraftResult]) -> float:
        """What drafting took, but not far beyond what was to be expected: otherwise one step that was held up
        could use up what is saved in thousands. What a drafter takes at first, nobody can know before, and
        what it reads of another row is not these rows' expense."""
        if not asked or not self._draft.known:
            return 0.0
        rows = [self._rows[result.id] for result in asked]
        num_behind = sum([row.num_behind for row in rows if row.num_behind > SMALL_CATCH_UP])
        passes = max(1, max([result.proposed for result in asked]))
        drafting = self._draft.round_seconds(len(rows), passes)
        clip = 1.0 if any(row.is_reading for row in self._rows.values()) else CLIP
        return min(step.draft_seconds, clip * (self._draft.catch_up_seconds() * num_behind + drafting))

    def release(self, id: RequestId) -> None:
        self._rows.pop(id, None)
        for acceptance in self._acceptance.values():
            acceptance.release(id)


def _by_kind(rows: Sequence[DraftDemand]) -> tuple[list[DraftDemand], list[DraftDemand]]:
    """Those with drafts at hand, and the others."""
    at_hand = [demand for demand in rows if demand.num_at_hand > 0]
    return at_hand, [demand for demand in rows if demand.num_at_hand == 0]
