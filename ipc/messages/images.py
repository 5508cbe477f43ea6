"""Images of prompts: which placeholders stand for them, where their pixels are, and how embeddings are made."""

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
    """One input tensor of the vision tower, row-major and little-endian."""

    name: ShortText  # the processor's name for it: "pixel_values", ...
    dtype: PixelType
    shape: _Sizes
    offset: Annotated[int, Meta(ge=0, le=2**40)]  # of its first byte


class PixelRef(Struct, frozen=True, array_like=True, gc=False):
    """Where the tensors of an image are: in a file of shared memory, or in the message itself."""

    segment: ShortText  # name of a file (`ipc/shared_files.py`), which the frontend removes at the request's end
    num_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    tensors: Annotated[tuple[PixelTensor, ...], Meta(max_length=16)]
    inline: bytes = b""  # the bytes themselves, if the engine may be on another machine; then `segment` is empty


class ImageRef(Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt. It takes positions [start, start + length): placeholders, and the tokens between them."""

    key: ImageKey
    start: _Position
    length: _Length
    num_embeddings: _Length  # positions among them with the image token, where the embeddings go, in order
    grid: _Sizes  # (t, h, w) in patches if position ids depend on it; other sizes otherwise
    pixels: PixelRef


class RowImage(Struct, frozen=True, array_like=True, gc=False):
    """An image of a sequence that enters a row; fields as in `ImageRef`."""

    key: ImageKey
    start: _Position
    length: _Length
    num_embeddings: _Length
    grid: _Sizes
    embedding_id: int  # 0: this row computes none of its positions


class EncodeImage(Message, frozen=True):
    """Make an image's embeddings while steps go on; `ImageEncoded` answers. No row uses them before that.

    The worker keeps them until they are dropped, or until it says hello again.
    """

    embedding_id: int  # never reused
    key: ImageKey
    grid: _Sizes
    num_embeddings: _Length
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
