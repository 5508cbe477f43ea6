"""The outputs of a prompt, with the names that vLLM uses."""

import math
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
    "BeamSearchOutput",
    "BeamSearchSequence",
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
class BeamSearchSequence:
    """A sequence that a beam search has found, after its prompt."""

    tokens: list[int]  # the prompt's, too
    text: str  # of all tokens
    cum_logprob: float  # of its outputs, with the token that ended it
    logprobs: list[Logprobs]  # of each output
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences after a prompt, best first."""

    request_id: str  # in a batch, the prompt's number, from 0
    sequences: list[BeamSearchSequence] = field(default_factory=list)
    error: ApiError | None = None  # as in `EmbeddingRequestOutput`
    finished: bool = True


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


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The result of a pair of texts."""

    request_id: str  # in a batch, the pair's number, from 0
    outputs: ScoringOutput = field(default_factory=lambda: ScoringOutput(math.nan))
    num_prompt_tokens: int = 0
    error: ApiError | None = None  # as in `EmbeddingRequestOutput`
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    """A probability for each class, in the order of the model's classes."""

    probs: list[float]
    label: str = ""  # of the most probable one

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """The classes of a text."""

    request_id: str  # in a batch, the text's number, from 0
    outputs: ClassificationOutput = field(default_factory=lambda: ClassificationOutput([]))
    num_prompt_tokens: int = 0
    error: ApiError | None = None  # as in `EmbeddingRequestOutput`
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """What was pooled of a text: a vector, or a number for each class."""

    data: list[float]


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of `encode`."""

    request_id: str  # in a batch, the text's number, from 0
    outputs: PoolingOutput = field(default_factory=lambda: PoolingOutput([]))
    num_prompt_tokens: int = 0
    error: ApiError | None = None  # as in `EmbeddingRequestOutput`
    finished: bool = True


AnyOutput = (
    RequestOutput
    | BeamSearchOutput
    | EmbeddingRequestOutput
    | ScoringRequestOutput
    | ClassificationRequestOutput
    | PoolingRequestOutput
)


class BatchError(Exception):
    """Some prompts of a batch failed; `outputs` has all others' results, and `error` is set in those of the failed."""

    def __init__(self, outputs: Sequence[AnyOutput]) -> None:
        failed = [output for output in outputs if output.error is not None]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} prompts failed, the first is prompt {first.request_id}: {first.error}; "
            "the other results are in `outputs` of this exception"
        )
        self.outputs: list[Any] = [*outputs]  # as returned by the method that raises this error
