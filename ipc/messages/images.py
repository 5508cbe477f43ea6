"""Images of prompts: what stands behind placeholders, where its pixels are, and its way through the vision tower."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import Message, ShortText

IMAGE_KEY_BYTES = 32

_MAX_INT = 2**31 - 1
_Position = Annotated[int, Meta(ge=0, le=_MAX_INT)]
_Length = Annotated[int, Meta(ge=1, le=_MAX_INT)]
_Sizes = Annotated[tuple[_Position, ...], Meta(max_length=16)]

ImageKey = Annotated[bytes, Meta(min_length=IMAGE_KEY_BYTES, max_length=IMAGE_KEY_BYTES)]
"""BLAKE2b-256 over the preprocessed pixel values, their shape, and the grid: equal keys mean equal embeddings."""

PixelType = Literal["float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


class PixelTensor(Struct, frozen=True, array_like=True, gc=False):
    """One tensor that the vision tower gets, row-major and little-endian."""

    name: ShortText  # as the checkpoint's processor calls it: "pixel_values", ...
    dtype: PixelType
    shape: _Sizes
    offset: Annotated[int, Meta(ge=0, le=2**40)]  # of its first byte


class PixelRef(Struct, frozen=True, array_like=True, gc=False):
    """Where the tensors of an image are: in a file of shared memory, or in the message itself."""

    segment: ShortText  # name of a file (`ipc/shared_files.py`), which the frontend removes at the request's end
    num_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    tensors: Annotated[tuple[PixelTensor, ...], Meta(max_length=16)]
    inline: bytes = b""  # the bytes themselves, where the engine may be on another machine; `segment` is empty then


class ImageRef(Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt. It takes the positions [start, start + length): placeholders, and what is between them."""

    key: ImageKey
    start: _Position
    length: _Length
    num_embeddings: _Length  # of these positions, those with the image token: the embeddings go there, in order
    grid: _Sizes  # (t, h, w) in patches where positions follow it; other sizes otherwise
    pixels: PixelRef


class RowImage(Struct, frozen=True, array_like=True, gc=False):
    """An image of a sequence that enters a row; fields as in `ImageRef`."""

    key: ImageKey
    start: _Position
    length: _Length
    num_embeddings: _Length
    grid: _Sizes
    embedding_id: int  # 0: none of its positions is computed in this row


class EncodeImage(Message, frozen=True):
    """Make the embeddings of an image while steps go on; `ImageEncoded` answers. No row uses them before that.

    The worker keeps them until they are dropped, or until it says hello again.
    """

    embedding_id: int  # never reused
    key: ImageKey
    grid: _Sizes
    num_embeddings: _Length
    pixels: PixelRef


class DropEmbedding(Message, frozen=True):
    """No row will use these embeddings any more. If they are still being made, that ends, and nothing answers."""

    embedding_id: int


class ImageEncoded(Message, frozen=True):
    """An image's embeddings are ready for rows, or could not be made."""

    embedding_id: int
    num_us: int = 0  # of the device's time
    error: str = ""  # why not, for the client
    is_lost: bool = False  # its pixels are gone: whoever made them has ended, or has given the request up
