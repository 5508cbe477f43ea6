"""One row that follows a grammar: its sampled tokens decide what it may sample next.

With drafts, the matcher advances over the guesses to find what may be sampled after each, and is then rolled back. It
advances for good only over tokens that are known to count.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from penstock.gpu_worker.devices.device import Download
from penstock.ipc.messages import SamplingParams
from penstock.parts.grammars.worker.store import Prototype

Words = npt.NDArray[np.int32]

_FULL = "too many states"
"""llguidance's message for an automaton that has reached its size limit."""

_NOTHING_FITS = "NoExtension"
_TOO_COMPLEX = "TooComplex"
"""Further messages of it."""

_MIN_TOKENS_PER_RENEWAL = 16
"""A row that fills a new automaton within fewer tokens than this would keep creating new ones."""


class DrawnTokens(NamedTuple):
    """Tokens that may not have reached the host yet: int32[1 + number of guesses] of a step's output."""

    download: Download
    place: int
    guesses: ListOf[int]

    def wait(self) -> list[int]:
        """The tokens that count: one, plus one for each right guess. Blocks until the device has sampled them."""
        num_drawn = 1 + len(self.guesses)
        column = np.frombuffer(self.download.wait(), dtype=np.int32, count=num_drawn, offset=4 * self.place)
        drawn: list[int] = column.tolist()
        num = 1
        while num < num_drawn and drawn[num - 1] == self.guesses[num - 1] and drawn[num] >= 0:
            num += 1
        return drawn[:num]


class GrammarRow:
    """All methods except `expect` run in the thread that fills masks."""

    def __init__(self, prototype: Prototype | None, sampling: SamplingParams, output_token_ids: Iterable[int]) -> None:
        """`output_token_ids`: outputs that are known already, after a preemption or a restart."""
        self._prototype = prototype
        self._sampling = sampling
        self._known = list(output_token_ids)
        self._drawn: deque[DrawnTokens] = deque()
        self._matcher: LLMatcher | None = None
        self._mask: Words = np.zeros((1, 0), dtype=np.int32)
        self._stops: Words | None = None  # the bits of its stop tokens
        self._generation = 0  # of the automaton that the matcher uses
        self._followed = array("i")  # the tokens that the matcher has consumed
        self._renewed_at = -_MIN_TOKENS_PER_RENEWAL
        self._num_outputs = 0
        self._has_stopped = False  # at a stop token; later tokens are dropped
        self._error = ""
        self.num_forced = 0
        """How many tokens are forced after the draws that the last masks were for, if all guesses are right."""

    def expect(self, tokens: DrawnTokens) -> None:
        """Note that a step was launched that samples the row's next tokens."""
        self._drawn.append(tokens)

    def prepare(self) -> None:
        """Advance the matcher over the known tokens."""
        if self._prototype is None:
            self._error = "the grammar was not prepared"
            return
        self._matcher, self._generation = self._prototype.copy()
        self._mask = np.zeros((1, -(-self._prototype.vocabulary.vocab_size // 32)), dtype=np.int32)
        for token_id in self._known:
            self._follow(token_id)

    def fail(self, error: str) -> None:
        """Sample no more tokens, for a reason outside the grammar."""
        self._error = error

    def extend(self, guesses: ListOf[int], most: int, num_tokens: int) -> list[int]:
        """Keep guesses up to the first that the grammar forbids or that ends the text, then append forced tokens.

        It waits until the tokens before the guesses are known.

        Args:
            guesses: guesses of the row's next tokens.
            most: the most tokens to return.
            num_tokens: size of the model's vocabulary.
        """
        self._follow_drawn()
        matcher, prototype = self._matcher, self._prototype
        if self._error or self._has_stopped or matcher is None or prototype is None or matcher.is_stopped():
            return []
        stops, end = self._sampling.stop_token_ids, min(num_tokens, prototype.vocabulary.vocab_size)
        kept = list(takewhile(lambda token: token < end and token not in stops, guesses[:most]))
        kept = kept[: matcher.try_consume_tokens(kept)]
        num_kept = len(kept)
        if num_kept < most and not matcher.is_error():
            kept += takewhile(lambda token: token < end, matcher.compute_ff_tokens()[: most - num_kept])
        self._go_back(num_kept)
        return kept

    def fill(self, words: Words, num_tokens: int, guesses: ListOf[int] = (), *, counts_forced: bool = False) -> str:
        """Write masks of what may be sampled after all launched tokens, and after each guess that follows them.

        It waits until the tokens are known.

        Args:
            words: int32[1 + number of guesses, W], the row's bits as in `kernels/sampling/token_masks.py`.
            num_tokens: size of the model's vocabulary; no token beyond it may be sampled.
            guesses: guesses of the row's next tokens.
            counts_forced: whether to set `num_forced`.

        Returns:
            Why no token is possible, or an empty string. If no token is possible, or the token will be dropped, all
            bits are set. If no token is possible after a guess, no bit is set for it.
        """
        self._follow_drawn()
        words[:] = -1
        self.num_forced = 0
        if self._error or self._has_stopped:
            return self._error
        self._error = self._fill_next(words[0], num_tokens, self._num_outputs)
        if self._error:
            words[:] = -1
        elif guesses:
            self._fill_after(guesses, words[1:], num_tokens, counts_forced=counts_forced)
        elif counts_forced:
            self._count_forced(words[-1])
        return self._error

    def _fill_after(self, guesses: ListOf[int], words: Words, num_tokens: int, *, counts_forced: bool) -> None:
        """`words`: int32[number of guesses, W]; rows after a stop token or a wrong guess are not changed."""
        matcher, num_ahead = self._matcher, 0
        assert matcher is not None, "prepare comes first"
        for guess, guess_words in zip(guesses, words, strict=True):
            if guess in self._sampling.stop_token_ids or not matcher.try_consume_tokens([guess]):
                break
            num_ahead += 1
            if self._fill_next(guess_words, num_tokens, self._num_outputs + num_ahead, is_ahead=True):
                guess_words[:] = 0
                break
        else:
            if counts_forced:
                self._count_forced(words[-1])
        self._go_back(num_ahead)

    def _count_forced(self, words: Words) -> None:
        """`words`: int32[W], what may be sampled at the matcher's position."""
        used = words[words.nonzero()[0]]
        if used.shape[0] == 1 and int(used[0]).bit_count() == 1 and self._matcher is not None:
            self.num_forced = max(0, len(self._matcher.compute_ff_tokens()) - 1)

    def _go_back(self, num_ahead: int) -> None:
        """Roll the matcher back over guesses. If the automaton is full, the matcher has stopped for good."""
        assert self._matcher is not None, "prepare comes first"
        if not self._matcher.is_error():
            self._matcher.rollback(num_ahead)
        elif self._prototype is not None:  # new automata are only made for tokens that count
            self._matcher, self._generation = self._prototype.copy()
            self._matcher.consume_tokens(self._followed.tolist())

    def _fill_next(self, words: Words, num_tokens: int, num_outputs: int, *, is_ahead: bool = False) -> str:
        """Write what may be sampled at the matcher's position into int32[W]; return why nothing may, or empty."""
        is_complete, error = self._fill_mask(may_renew=not is_ahead)
        if error:
            return error
        params = self._sampling
        width = min(self._mask.shape[1], words.shape[0])
        words[:] = 0
        words[:width] = self._mask[0, :width]
        if self._stops is None:
            self._stops = _bits(params.stop_token_ids, words.shape[0], num_tokens)
        if num_outputs < params.min_tokens:
            words &= ~self._stops  # as the sampler does
        elif is_complete:
            words |= self._stops
        if params.allowed_token_ids:
            words &= _bits(params.allowed_token_ids, words.shape[0], num_tokens)
        if num_tokens & 31:
            words[-1] &= (1 << (num_tokens & 31)) - 1
        if words.any():
            return ""
        limits = [name for name in ("min_tokens", "allowed_token_ids") if getattr(params, name)]
        return f"the grammar{''.join(f' with {name}' for name in limits)} allows no token after the first {num_outputs}"

    def _fill_mask(self, *, may_renew: bool) -> tuple[bool, str]:
        """Write the matcher's allowed tokens into the mask; return whether the text may end here, and what failed."""
        matcher = self._matcher
        assert matcher is not None, "prepare comes first"
        is_complete = matcher.is_stopped()
        self._mask[:] = 0
        may_end = is_complete
        if not is_complete:
            may_end = matcher.is_accepting()
            fill_next_token_bitmask(matcher, self._mask)
            is_complete = matcher.is_accepting()
        if not matcher.is_error():
            return is_complete, ""
        if may_renew and self._renew():
            return self._fill_mask(may_renew=may_renew)
        self._mask[:] = 0
        if may_end:
            return True, ""  # the text is whole: it ends here instead of going on
        return False, f"{_stuck(matcher.get_error())} after the first {self._num_outputs} tokens"

    def _renew(self) -> bool:
        """Continue with a new automaton, if the one that is shared with other rows is full."""
        matcher, prototype = self._matcher, self._prototype
        if matcher is None or prototype is None or _FULL not in matcher.get_error():
            return False
        if self._num_outputs - self._renewed_at < _MIN_TOKENS_PER_RENEWAL or not prototype.renew(self._generation):
            return False
        self._renewed_at = self._num_outputs
        self._matcher, self._generation = prototype.copy()
        return bool(self._matcher.consume_tokens(self._followed.tolist()))

    def _follow_drawn(self) -> None:
        while self._drawn:
            for token_id in self._drawn.popleft().wait():
                self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        if token_id < 0:
            self._error = "no token could be sampled"  # the step's result says why
        self._num_outputs += 1
        if self._error or self._has_stopped or self._matcher is None:
            return
        if token_id in self._sampling.stop_token_ids:
            self._has_stopped = True
        elif self._matcher.consume_token(token_id) or (self._renew() and self._matcher.consume_token(token_id)):
            self._followed.append(token_id)
        else:
            self._error = (
                f"the grammar does not allow token {token_id}, the {self._num_outputs}th of the output: "
                "the request's other parameters left no other token"
            )


def _stuck(said: str) -> str:
    """Why the library cannot go on, in a sentence for the client."""
    if _NOTHING_FITS in said:
        return "the form allows nothing more, though it is not complete,"
    if _FULL in said or _TOO_COMPLEX in said:
        return "the form is too complex to go on"
    return "the form cannot be followed any further"


def _bits(token_ids: Iterable[int], num_words: int, num_tokens: int) -> Words:
    """int32[W] with the bits of these tokens set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if token_id < num_tokens:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words.view(np.int32)
