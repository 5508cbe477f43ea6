"""Length-aware batching: sequences of about the same expected length run together."""

from collections.abc import Iterable
from math import log2

from penstock.core.sequences.output_lengths import LengthPredictor
from penstock.core.sequences.sequence import Request
from penstock.parts.batching.options import BatchingOptions
from penstock.parts.batching.scheduler.static import Static, first_that_fit


class LengthAware(Static):
    """Like static batching, but a batch has the requests nearest in length to the one whose turn it is.

    A prompt's length is known; an output's is predicted from outputs that have ended. The output counts most: a row
    stands empty from its own last token until the batch's last one. Lengths are compared by their logarithms: a batch
    of 10 and 40 tokens wastes as large a part as one of 100 and 400.
    """

    def __init__(self, options: BatchingOptions) -> None:
        self._lengths = LengthPredictor()

    def on_finished(self, request: Request, num_outputs: int) -> None:
        self._lengths.learn(request, num_outputs)

    def choose(self, waiting: Iterable[Request], size: int) -> list[Request]:
        first, *others = waiting
        output, prompt = self._logs(first)

        def distance(request: Request) -> tuple[float, float]:
            of_output, of_prompt = self._logs(request)
            return round(abs(of_output - output), 1), abs(of_prompt - prompt)

        return first_that_fit([first, *sorted(others, key=distance)], size)

    def _logs(self, request: Request) -> tuple[float, float]:
        return log2(max(self._lengths.predict(request), 1.0)), log2(request.num_prompt_tokens)
