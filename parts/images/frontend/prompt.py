"""Placeholders in a prompt: in its text before it is tokenized, in its tokens afterwards."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.frontend.errors import InvalidRequest
from penstock.parts.images.families import Placeholder


class Span(NamedTuple):
    """Where an image is in a prompt: from its first image token to its last one."""

    start: int
    length: int
    num_embeddings: int  # image tokens among these positions


def check_marks(text: str, mark: str, num_images: int) -> None:
    """Check that a chat template has written a mark for each image.

    Raises:
        InvalidRequest: it has written more or fewer.
    """
    if (num_marks := text.count(mark)) != num_images:
        raise InvalidRequest(
            f"the chat template has places for {num_marks} images; these messages have {num_images}", param="messages"
        )


def with_placeholders(text: str, mark: str, placeholders: Sequence[Placeholder]) -> str:
    """A chat template's text in which each mark is replaced by its image's placeholder."""
    parts = text.split(mark)
    filled = [parts[0]]
    for placeholder, part in zip(placeholders, parts[1:], strict=True):
        filled += (placeholder.text, part)
    return "".join(filled)


def expanded(
    token_ids: list[int], image_token_id: int, placeholders: Sequence[Placeholder]
) -> tuple[list[int], list[Span]]:
    """The token ids, with every image token repeated to the length of its run, and where each image is then.

    Raises:
        InvalidRequest: the number of image tokens is not the number of runs.
    """
    if token_ids.count(image_token_id) != sum(len(placeholder.runs) for placeholder in placeholders):
        raise InvalidRequest("message text contains the image placeholder token", param="messages")
    longer: list[int] = []
    spans: list[Span] = []
    copied = 0
    for placeholder in placeholders:
        start = -1
        for run in placeholder.runs:
            place = token_ids.index(image_token_id, copied)
            longer += token_ids[copied:place]
            start = len(longer) if start < 0 else start
            longer += [image_token_id] * run
            copied = place + 1
        spans.append(Span(start, len(longer) - start, sum(placeholder.runs)))
    return longer + token_ids[copied:], spans
