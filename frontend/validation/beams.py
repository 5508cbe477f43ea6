"""Beam search: which fields ask for it, and which others cannot stand beside it."""

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from penstock.config.samplers import samplers
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.validation.tokens import shown
from penstock.ipc.messages import SamplerUse

_LARGEST_PENALTY = 100.0

_EXCLUDED = (
    "stop", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "prompt_logprobs",
    "allowed_token_ids", "logits_processors",
)  # fmt: skip
"""What changes probabilities, or ends a text by its letters; so do samplers that penalize. Whether an output must match
something, and which images are before it, is known later. What is only about draws has no effect."""

_NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Beams(NamedTuple):
    """A search for the most likely sequences, in place of draws."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # or "never"


def asks_for_beams(request: Any) -> bool:
    """Whether a request asks for a search; a width alone does so, too."""
    asked: bool | None = request.use_beam_search
    return (request.beam_width or 0) > 1 if asked is None else asked


def refuse_beside(field: str) -> NoReturn:
    """Refuse what cannot stand beside a search.

    Raises:
        UnsupportedParameter: always.
    """
    raise UnsupportedParameter(f"{field} is not supported with use_beam_search", param=field)


def refuse_penalties(used: Iterable[SamplerUse]) -> None:
    """Refuse samplers that would change what a search finds.

    Raises:
        UnsupportedParameter: there is one.
    """
    for use in used:
        kind = samplers().get(use.name)
        if kind is not None and kind.penalizes:
            refuse_beside(kind.parameters[0].name)


def check_beams(request: Any, n: int, max_n: int, num_stop_ids: int, max_best: int) -> Beams | None:
    """The search that a request asks for, and None if it asks for none.

    Args:
        request: a `SamplingRequest`.
        n: how many sequences are returned.
        max_n: the most that a request may have.
        num_stop_ids: how many tokens end a sequence.
        max_best: the most log-probabilities of a position.

    Raises:
        InvalidParameter: a value is out of bounds.
        UnsupportedParameter: another field does not go along with it.
    """
    width = request.beam_width
    if width is not None and not 1 <= width <= max_n:
        raise InvalidParameter(f"beam_width must be between 1 and {max_n}, got {shown(width)}", param="beam_width")
    if not asks_for_beams(request):
        return None
    width = width or request.best_of or n
    if request.best_of not in (None, n, width):
        raise InvalidParameter(
            f"beam_width ({width}) and best_of ({shown(request.best_of)}) exclude each other", param="best_of"
        )
    if width < n:
        raise InvalidParameter(f"beam_width ({width}) must be at least n ({n})", param="beam_width")
    if width + num_stop_ids > max_best:
        raise InvalidParameter(
            f"beam_width may be at most {max_best - num_stop_ids}: {max_best} minus the number of stop tokens, "
            f"got {shown(width)}",
            param="beam_width",
        )
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    if not -_LARGEST_PENALTY <= penalty <= _LARGEST_PENALTY:  # NaN, too
        raise InvalidParameter(
            f"length_penalty must be between {-_LARGEST_PENALTY:g} and {_LARGEST_PENALTY:g}, got {penalty:g}",
            param="length_penalty",
        )
    early = request.early_stopping
    if isinstance(early, str) and early != "never":
        raise InvalidParameter(
            f"early_stopping must be true, false or 'never', got {early[:64]!r}", param="early_stopping"
        )
    for field in _EXCLUDED:
        value = getattr(request, field, None)
        if value not in (None, "", [], {}) and value != _NEUTRAL.get(field):
            refuse_beside(field)
    return Beams(width, penalty, early or False)
