"""Log-probabilities as clients read them: OpenAI's shapes for chat and completions, vLLM's `prompt_logprobs`.

A prompt's log-probabilities may be hundreds of thousands of numbers, so one of the tokenizer's threads writes them.
"""

from collections.abc import Sequence

from penstock.frontend.engine.scores import ShownToken, TokenScore, read_scores
from penstock.frontend.schema import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import ValidLogprobs
from penstock.ipc.messages import TokenLogprobs

LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot express; vLLM's choice."""


class ScoreWriter:
    """Writes one request's log-probabilities.

    A token is named by its text; if that is not whole characters, by its bytes, as in `bytes:\\xe2\\x82`. Tokens that
    the tokenizer does not know, and all tokens with `as_token_ids`, are named by their ids, as in `token_id:7`.
    """

    def __init__(self, tokenizer: TextTokenizer, num_best: int, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_best = num_best
        self._as_token_ids = as_token_ids
        self._names: dict[int, str] = {}

    def chat(self, tokens: Sequence[ShownToken]) -> ChatLogprobs:
        """The tokens of a message, or of a chunk of it."""
        return ChatLogprobs([self._content(token.score) for token in tokens])

    def completion(
        self, tokens: Sequence[ShownToken], start: int = 0, prompt: CompletionLogprobs | None = None
    ) -> CompletionLogprobs:
        """The tokens of a text that starts at character `start` of the choice, after an echoed prompt if given."""
        before = prompt or CompletionLogprobs([], [], [], [])
        return CompletionLogprobs(
            text_offset=before.text_offset + [start + token.offset for token in tokens],
            token_logprobs=before.token_logprobs + [max(token.score.logprob, LEAST) for token in tokens],
            tokens=before.tokens + [self._name(token.score.token_id) for token in tokens],
            top_logprobs=before.top_logprobs + [self._candidates(token.score) for token in tokens],
        )

    def echoed(self, prompt: list[int], pieces: list[TokenLogprobs], echo: str) -> CompletionLogprobs:
        """An echoed prompt's tokens; the first one has no log-probability."""
        scores = _together(pieces)
        return CompletionLogprobs(
            text_offset=self._offsets(prompt, echo),
            token_logprobs=[None, *(max(score.logprob, LEAST) for score in scores)],
            tokens=[self._name(token_id) for token_id in prompt],
            top_logprobs=[None, *(self._candidates(score) for score in scores)],
        )

    def prompt(self, pieces: list[TokenLogprobs]) -> PromptLogprobs:
        """vLLM's field: the most likely tokens and the prompt's own, each with its rank."""
        return [None, *(self.ranked(score) for score in _together(pieces))]

    def ranked(self, score: TokenScore) -> dict[int, PromptLogprob]:
        """One position: the most likely tokens and the actual one, by id."""
        best = [(token_id, value, rank) for rank, (token_id, value) in enumerate(score.best[: self._num_best], 1)]
        return {
            token_id: PromptLogprob(max(logprob, LEAST), rank, self._name(token_id))
            for token_id, logprob, rank in (*best, (score.token_id, score.logprob, score.rank))
        }

    def _content(self, score: TokenScore) -> ContentLogprob:
        token_id, logprob = score.token_id, max(score.logprob, LEAST)
        best = [
            TopLogprob(self._name(other), max(value, LEAST), self._bytes(other))
            for other, value in score.best[: self._num_best]
        ]
        return ContentLogprob(self._name(token_id), logprob, self._bytes(token_id), best)

    def _candidates(self, score: TokenScore) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in (*score.best[: self._num_best], (score.token_id, score.logprob)):
            named.setdefault(self._name(token_id), max(logprob, LEAST))
        return named

    def _offsets(self, prompt: list[int], echo: str) -> list[int]:
        """Where each prompt token begins in the echoed text, whether or not the text has special tokens."""
        for skips in (False, True):
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skips)
            offsets, length = [], 0
            for token_id in prompt:
                offsets.append(length)
                length += len(detokenizer.feed(token_id))
            if length + len(detokenizer.flush()) == len(echo):
                break
        return [min(offset, len(echo)) for offset in offsets]

    def _bytes(self, token_id: int) -> list[int] | None:
        spelled = self._tokenizer.token_bytes(token_id)
        return None if spelled is None else list(spelled)

    def _name(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._make_name(token_id)
        return name

    def _make_name(self, token_id: int) -> str:
        spelled = None if self._as_token_ids else self._tokenizer.token_bytes(token_id)
        if spelled is None:
            return f"token_id:{token_id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs(
    tokenizer: TextTokenizer, asked: ValidLogprobs, pieces: list[TokenLogprobs]
) -> PromptLogprobs | None:
    """An answer's `prompt_logprobs`, if requested."""
    if asked.prompt < 0:
        return None
    return ScoreWriter(tokenizer, asked.prompt, as_token_ids=asked.as_token_ids).prompt(pieces)


def _together(pieces: list[TokenLogprobs]) -> list[TokenScore]:
    return [score for table in pieces for score in read_scores(table)]
