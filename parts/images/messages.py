"""What scheduler and worker tell each other of images."""

from penstock.ipc.messages import ImageKey, Message, PixelRef
from penstock.ipc.messages.images import Length, Sizes


class EncodeImage(Message, frozen=True):
    """Make an image's embeddings while steps go on; `ImageEncoded` answers. No row uses them before that.

    The worker keeps them until they are dropped, or until it says hello again.
    """

    embedding_id: int  # never reused
    key: ImageKey
    grid: Sizes
    num_embeddings: Length
    pixels: PixelRef


class DropEmbedding(Message, frozen=True):
    """No row will use these embeddings any more. If they are still being made, that stops without an answer."""

    embedding_id: int


class ImageEncoded(Message, frozen=True):
    """An image's embeddings are ready for rows, or could not be made."""

    embedding_id: int
    num_us: int = 0  # device time
    error: str = ""  # why not, for the client
    is_lost: bool = False  # its pixels are gone: the frontend that made them has ended, or dropped the request


TO_WORKER = (EncodeImage, DropEmbedding)
FROM_WORKER = (ImageEncoded,)
