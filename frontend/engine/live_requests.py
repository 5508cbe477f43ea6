"""A request that the engine works on, with all that another scheduler needs to go on with it.

submitted --deltas--> submitted ... --> finished
    |  ^
    |  | resubmitted, under a new id, with the tokens that arrived      (EngineClient, once an engine is ready)
    v  |
   lost                                                                 (its scheduler is gone)
"""

import sys
from array import array
from typing import Protocol

from msgspec.structs import replace

from penstock.frontend.errors import ApiError
from penstock.ipc.messages import AddRequest, SequenceDelta, SequenceProgress

MAX_LOSSES = 3
"""A request that is lost so often without a token in between may itself be what ends the scheduler."""


class DeltaSink(Protocol):
    """Where the deltas of a submitted request go."""

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        """Take a delta of sequence `first_index + delta.sequence_idx`."""
        ...

    def fail(self, error: ApiError) -> None:
        """The request will get no more deltas."""
        ...


class LiveRequest:
    """A submitted request with unfinished sequences. What was pushed to the sink is never asked for again."""

    __slots__ = (
        "_num_prompt_logprobs",
        "_num_submissions",
        "_outputs",
        "first_index",
        "is_lost",
        "is_paused",
        "lost_at",
        "num_losses",
        "request",
        "sink",
        "unfinished",
        "wire_id",
    )

    def __init__(self, request: AddRequest, sink: DeltaSink, first_index: int) -> None:
        self.request = request
        self.sink = sink
        self.first_index = first_index
        self.unfinished = set(range(request.n))
        self.wire_id = ""  # what the scheduler knows it by
        self.is_lost = True  # no scheduler knows of it
        self.is_paused = False  # its client does not keep up
        self.lost_at = 0.0  # time of the first loss since its last token
        self.num_losses = 0  # since its last token
        self._num_submissions = 0
        self._outputs = [array("i") for _ in range(request.n)]
        self._num_prompt_logprobs = 0

    def lose(self, now: float) -> None:
        """No scheduler knows of it any more."""
        self.is_lost = True
        if not self.num_losses:
            self.lost_at = now
        self.num_losses += 1

    def message(self) -> AddRequest:
        """The request as it must be submitted now, under an id of its own.

        Whatever an earlier scheduler, or an earlier connection, still says of it is thereby nobody's.
        """
        request_id = self.request.request_id
        self.wire_id = f"{request_id}#{self._num_submissions}" if self._num_submissions else request_id
        if not self._num_submissions:
            self._num_submissions = 1
            return self.request
        self._num_submissions += 1
        progress = tuple(
            SequenceProgress(idx, _pack(self._outputs[idx]), 0 if idx else self._num_prompt_logprobs)
            for idx in sorted(self.unfinished)
        )
        return replace(self.request, request_id=self.wire_id, progress=progress)

    def take(self, delta: SequenceDelta) -> bool:
        """Note a delta; False if its sequence has had its end already."""
        idx = delta.sequence_idx
        if idx not in self.unfinished:
            return False
        self.num_losses = 0
        self._outputs[idx].extend(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(delta.prompt_logprobs.ranks) // 4
        if delta.finish_reason is not None:
            self.unfinished.discard(idx)
        return True


def _pack(token_ids: "array[int]") -> bytes:
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = token_ids[:]
    swapped.byteswap()
    return swapped.tobytes()
