"""The outputs of a prompt, with the names that vLLM uses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.frontend.api.logprobs import ScoreWriter
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.schema import Bill
from penstock.frontend.schema import PromptLogprob as Logprob

__all__ = [
    "BatchError",
    "Bill",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "Logprobs",
    "RequestOutput",
]

Logprobs = dict[int, Logprob]
"""By token id: the most likely tokens of one position, and the actual token there."""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of tokens after a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # includes the token that stopped it
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None  # "stop" or "length"; None: not finished
    stop_reason: str | int | None = None  # the stop string or the id of stop_token_ids that ended it

    def add(self, event: SequenceEvent, scores: ScoreWriter | None) -> None:
        """Append new text and tokens."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if scores is not None:
            self.logprobs = self.logprobs or []
            self.cumulative_logprob = self.cumulative_logprob or 0.0
            for token in event.scores or ():
                self.logprobs.append(scores.ranked(token.score))
                self.cumulative_logprob += token.score.logprob

    def copy(self) -> "CompletionOutput":
        """A copy that does not grow with this object."""
        return replace(self, token_ids=[*self.token_ids], logprobs=self.logprobs and [*self.logprobs])


@dataclass(slots=True)
class RequestOutput:
    """All sequences of one prompt."""

    request_id: str  # in a batch, the prompt's number, from 0
    prompt: str | None = None  # None if it was given as token ids or as a chat
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None  # None for the first token
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    bill: Bill | None = None  # what the engine spent on the request, once it is finished
    warnings: list[str] = field(default_factory=list)  # parameters that were honoured in an unexpected way
    error: ApiError | None = None  # why there are no outputs; only in results of `generate_iter` and `BatchError`


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The result of a prompt for an embedding."""

    request_id: str  # in a batch, the prompt's number, from 0
    outputs: EmbeddingOutput = field(default_factory=lambda: EmbeddingOutput([]))
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    bill: Bill | None = None  # what the engine spent on the request
    warnings: list[str] = field(default_factory=list)  # as in `RequestOutput`
    error: ApiError | None = None  # why there is no vector; only in the outputs of `BatchError`
    finished: bool = True


class BatchError(Exception):
    """Some prompts of a batch failed; `outputs` has all others' results, and `error` is set in those of the failed."""

    def __init__(self, outputs: Sequence[RequestOutput | EmbeddingRequestOutput]) -> None:
        failed = [output for output in outputs if output.error is not None]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} prompts failed, the first is prompt {first.request_id}: {first.error}; "
            "the other results are in `outputs` of this exception"
        )
        self.outputs: list[Any] = [*outputs]  # as returned by the method that raises this error
