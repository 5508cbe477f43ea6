"""Predicts how long a request will keep a row, from this machine's step times and the lengths of outputs."""

from penstock.core.sequences.output_lengths import LengthPredictor
from penstock.core.sequences.sequence import Request
from penstock.parts.policies.scheduler.view import View

_PREFILL_US, _DECODE_US = 50.0, 10_000.0
"""Assumed times of a prompt token and of a decode step until they are measured. Only their ratio matters."""


def predicted_us(request: Request, lengths: LengthPredictor, view: View) -> float:
    """Return the microseconds from a sequence's first chunk to its last token, when all rows are in use.

    The part of the prompt that is cached now is left out. All sequences of a request count: it ends with the last of
    them, and they compete for the same rows.
    """
    num_sequences = max(1, len(request.waiting) + len(request.running))
    num_cached = view.num_cached_tokens(request)
    num_prompt = request.num_prompt_tokens - num_cached
    prefill = view.prefill_us(num_prompt, num_cached) or num_prompt * _PREFILL_US
    step = view.decode_us(view.max_num_seqs, request.num_prompt_tokens) or _DECODE_US
    return prefill + lengths.predict(request) * num_sequences * step
