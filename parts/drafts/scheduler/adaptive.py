"""How many tokens to guess for each row: the numbers that bring the most tokens per second, which may be none.

A step of R rows that is expected to take T microseconds brings R tokens. Each guess brings what `acceptance.py`
expects of it. The guesses of all rows are taken in order of what they bring, up to the number with the highest

    (R + what the guesses bring) / (T + what they cost)

with measured times (`costs.py`). The more rows a step has, the more a position costs, because the device is then
bound by compute rather than by reading weights. So a server under load stops guessing by itself.

The estimates may be wrong, and rows change. So guesses that seem not to pay are tried again, rarely. A ledger bounds
the cost of that, whatever the estimates say. Its unit is the time of a step without guesses. Each such step adds a
small part (`_SHARE`); each step with guesses takes its extra time, less what its extra tokens are worth. While the
ledger is empty, nothing is guessed. So on text that no drafter can guess, a server loses at most that part of its
speed.
"""

from collections.abc import Sequence as ListOf
from math import ceil

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.parts.drafts.scheduler.acceptance import RowAcceptance, ServerAcceptance
from penstock.parts.drafts.scheduler.costs import DraftCosts
from penstock.parts.drafts.scheduler.lengths import DraftLengths, FixedLengths

_SHARE = 0.012  # of all time may go to guesses that do not pay
_FIRST_BALANCE, _MOST_BALANCE, _LEAST_BALANCE = 3.0, 6.0, -10.0
_MAX_LOSS = 3.0  # most that one step counts: a stopped process says nothing about guesses
_LEAST_SPEEDUP = 1.02  # less is noise
_LONGEST_SLEEP = 32  # steps until guesses are considered again
_MAX_INTERVAL = 64.0  # steps between two tries of a row that keeps failing
_TRIAL = 2  # guesses
_LONGEST_PAUSE = 16
"""Most steps between two tries, after fruitless ones: this, and one more for every four rows, because a step with
guesses costs the scheduler a little for each row."""

_PLAIN_EVERY = 64  # one step in so many goes without guesses, to measure its time
_LEARN_EVERY = 32  # one step without guesses in so many is learned from
_LEARN_WITH_EVERY = 4  # one step with guesses in so many, once costs are known
_LEAST_GAIN = 0.2  # least tokens that a guess must bring while its cost is unknown


def draft_lengths(most: int, before: DraftLengths) -> DraftLengths:
    """Lengths for a worker that guesses up to `most` tokens per row; `before`: those of an earlier worker."""
    if not most:
        return FixedLengths(0)
    if isinstance(before, AdaptiveLengths) and before.most == most:
        return before
    return AdaptiveLengths(most)


class AdaptiveLengths(DraftLengths):
    """Learns from each step."""

    __slots__ = (
        "_balance", "_num_plain", "_num_with", "_pause", "_plain_rows", "_step", "_tries_at", "_wakes_at",
        "acceptance", "costs", "most", "why",
    )  # fmt: skip

    def __init__(self, most: int) -> None:
        """`most`: largest number of guesses for a row."""
        self.most = most
        self.acceptance = ServerAcceptance(most)
        self.costs = DraftCosts()
        self.why = ""
        self._balance = _FIRST_BALANCE
        self._step = 0  # number of plans
        self._wakes_at = 0
        self._pause = 1  # steps between tries
        self._tries_at = 0
        self._num_with = 0  # steps with guesses since the last one without
        self._num_plain = 0  # steps without guesses since the last one learned from
        self._plain_rows = 0  # rows of the step learned from last

    def lengths(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """See `DraftLengths`."""
        self._step += 1
        if self._step < self._wakes_at or not decodes or room.num_tokens <= 0:
            return ()
        lengths = self._choose(decodes, room)
        if any(lengths):
            self._num_with += 1
            return lengths
        self._num_with = 0
        return ()

    def _choose(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        if not self.costs.is_known:
            return self._learn_costs(decodes, room)
        if self._balance < 0:
            self._sleep("drafts have cost too much", ceil(-self._balance / _SHARE))
            return ()
        if self._num_with >= _PLAIN_EVERY:
            self.why = "measures a step without"
            return ()
        plain_us = max(1.0, self.costs.plain_us(len(decodes), room.num_context))
        lengths, speedup = self._best(decodes, plain_us, room.num_tokens)
        if room.has_prompts:
            self.why = "pays" if lengths else "prompts"
            return lengths
        is_trial = self._try(decodes, plain_us, lengths, room)
        if lengths and speedup:
            self.why = f"pays: {speedup:.2f}"
        elif is_trial:
            self.why = "tries"
        return lengths

    def _learn_costs(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """Return no guesses at first, and then varied lengths, to learn what they cost."""
        if not self.costs.is_plain_known or self._balance < 0:
            self.why = "measures a step without"
            return ()
        if room.has_prompts:  # a step with prompts says nothing about the cost of guesses
            return ()
        self.why = "measures a step with drafts"
        most = room.num_tokens
        longest = (self.most, max(1, self.most // 2), 1)[self._step % 3]
        counts = [0] * len(decodes)
        for i, seq in enumerate(decodes):
            row = seq.acceptance
            gains = self.acceptance.gains if row is None else row.gains
            counts[i] = min(longest, most, self._limit(seq), sum(gain >= _LEAST_GAIN for gain in gains) or 1)
            most -= counts[i]
        return counts if any(counts) else ()

    def _limit(self, seq: Sequence) -> int:
        allowed = seq.request.sampling.max_drafts
        return self.most if allowed < 0 else min(allowed, self.most)

    def _best(self, decodes: ListOf[Sequence], plain_us: float, most: int) -> tuple[list[int], float]:
        """Return the lengths that bring the most tokens per second (empty: none), and the speedup over no guesses."""
        asked_us, guess_us, longest_us = self.costs.extra_us()
        num_rows, server = len(decodes), self.acceptance
        worth = guess_us * num_rows / plain_us  # a guess that brings less does not pay
        guesses: list[tuple[float, int, int, float]] = []
        for i, seq in enumerate(decodes):
            row = seq.acceptance
            gains, rate = (server.gains, server.guess_rate) if row is None else (row.gains, row.guess_rate)
            for j in range(self._limit(seq)):
                if gains[j] <= worth:
                    break
                guesses.append((-gains[j], j, i, rate))
        guesses.sort()
        best, best_num, speed = _LEAST_SPEEDUP * num_rows / plain_us, 0, 0.0
        tokens, num_us, longest = float(num_rows), plain_us + asked_us, 0.0
        for num, (gain, j, _, rate) in enumerate(guesses[:most], 1):
            tokens -= gain * rate
            num_us += guess_us * rate
            longest = max(longest, (j + 1) * rate)
            speed = tokens / (num_us + longest_us * longest)
            if speed > best:
                best, best_num = speed, num
        if not best_num:
            return [], 0.0
        lengths = [0] * num_rows
        for _, _, i, _ in guesses[:best_num]:
            lengths[i] += 1
        return lengths, best * plain_us / num_rows

    def _try(self, decodes: ListOf[Sequence], plain_us: float, lengths: list[int], room: DraftRoom) -> bool:
        """Add a few guesses for rows without any that were not tried for long, as far as the ledger allows.

        Sleeps if there are no guesses at all. Returns whether something is tried.
        """
        asked_us, guess_us, longest_us = self.costs.extra_us()
        size = min(_TRIAL, self.most)
        first_cost = 0.0 if lengths else (asked_us + longest_us * size) / plain_us
        each_cost = size * guess_us * self.acceptance.guess_rate / plain_us
        left, most = self._balance - first_cost, room.num_tokens - sum(lengths)
        if room.is_awaited and not lengths:
            return False  # wait for the step with guesses in flight
        if self._step < self._tries_at:
            if not lengths:
                self._sleep("costs more than it brings", self._tries_at - self._step)
            return False
        if left < each_cost:
            if not lengths:
                self._sleep("tries would cost too much", ceil((first_cost + each_cost - self._balance) / _SHARE))
            return False
        chosen = [
            i
            for i, seq in enumerate(decodes)
            if not (lengths and lengths[i]) and _tries_at(seq) <= self._step and self._limit(seq)
        ]
        if not chosen:
            if not lengths:
                soonest = min((seq.acceptance.tries_at for seq in decodes if seq.acceptance), default=self._step)
                self._sleep("costs more than it brings", soonest - self._step)
            return False
        if each_cost and len(chosen) > (num := max(1, int(left / each_cost))):
            chosen = sorted(chosen, key=lambda i: _tries_at(decodes[i]))[:num]
        self._tries_at = self._step + self._pause
        self._pause = min(_LONGEST_PAUSE + len(decodes) // 4, 2 * self._pause)
        lengths += [0] * (len(decodes) - len(lengths))
        for i in chosen:
            seq = decodes[i]
            if seq.acceptance is None:
                seq.acceptance = RowAcceptance(self.acceptance)
            lengths[i] = min(size, self._limit(seq), most)
            most -= lengths[i]
            seq.acceptance.tries_at = self._step + max(1, int(seq.acceptance.interval))
        return True

    def _sleep(self, why: str, num_steps: int) -> None:
        self.why = why
        self._wakes_at = self._step + min(max(1, num_steps), _LONGEST_SLEEP)

    # --- results ------------------------------------------------------------------------------

    def note_plain(self, num_rows: int, num_context: int, num_us: int) -> None:
        """See `DraftLengths`."""
        self._num_plain += 1
        if self._balance < _MOST_BALANCE:
            self._balance += _SHARE
        if self._num_plain >= _LEARN_EVERY or num_rows != self._plain_rows or not self.costs.is_known:
            self._num_plain, self._plain_rows = 0, num_rows
            self.costs.learn_plain(num_rows, num_context, num_us)

    def saved_us(self, outcome: DraftOutcome) -> float:
        """See `DraftLengths`."""
        if outcome.has_chunks or not outcome.num_us or not self.costs.is_plain_known:
            return 0.0
        num_rows = len(outcome.seqs)
        return sum(outcome.num_tokens) / num_rows * self.costs.plain_us(num_rows, outcome.num_context) - outcome.num_us

    def guesses_us(self, num_guesses: int, longest: int) -> float:
        """See `DraftLengths`."""
        asked_us, guess_us, longest_us = self.costs.extra_us()
        return asked_us + guess_us * num_guesses + longest_us * longest

    def note(self, outcome: DraftOutcome) -> None:
        """See `DraftLengths`."""
        server, is_good = self.acceptance, False
        num_guesses = longest = num_accepted = 0
        for seq, allowed, guessed, num_tokens in zip(
            outcome.seqs, outcome.num_allowed, outcome.num_guessed, outcome.num_tokens, strict=True
        ):
            if not allowed:
                continue
            accepted = max(0, num_tokens - 1)
            if seq.acceptance is None:
                seq.acceptance = RowAcceptance(server)
            row = seq.acceptance
            server.note(allowed, guessed, accepted)
            row.note(allowed, guessed, accepted, server)
            if guessed:
                num_guesses += guessed
                num_accepted += accepted
                longest = max(longest, guessed)
                if accepted:
                    is_good, row.interval, row.tries_at = True, 0.0, 0
                else:
                    row.interval = min(_MAX_INTERVAL, 1.5 * row.interval + 1)
        server.update()
        if is_good:
            self._wakes_at = self._tries_at = 0
            self._pause = 1
        if outcome.has_chunks:
            return
        num_rows, num_context = len(outcome.seqs), outcome.num_context
        if self.costs.is_plain_known and outcome.num_us:
            plain_us = max(1.0, self.costs.plain_us(num_rows, num_context))
            loss = min(outcome.num_us / plain_us - 1, _MAX_LOSS) - num_accepted / num_rows
            self._balance = min(max(self._balance - loss, _LEAST_BALANCE), _MOST_BALANCE)
        if not self.costs.is_known or self._step % _LEARN_WITH_EVERY == 0:
            self.costs.learn_with(num_rows, num_context, num_guesses, longest, outcome.num_us)


def _tries_at(seq: Sequence) -> int:
    return 0 if seq.acceptance is None else seq.acceptance.tries_at
