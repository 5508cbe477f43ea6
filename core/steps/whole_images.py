"""Where chunks may end if the positions of an image attend to each other: before an image, or behind it."""

from penstock.core.sequences.sequence import Sequence


def whole_end(seq: Sequence, start: int, end: int, most: int) -> int:
    """Return where a chunk from `start` on must end, if `end` is the preferred place.

    The answer is between `start` and `most`; it is `start` if the image there does not fit.
    """
    for image in seq.request.images:
        behind = image.start + image.length
        if image.start < end < behind:
            if image.start > start:
                return image.start
            return behind if behind <= most else start
    return end
