"""Images of prompts: which placeholders stand for them, where their pixels are, and how embeddings are made."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import ShortText

IMAGE_KEY_BYTES = 32

_MAX_INT = 2**31 - 1
_Position = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Length = Annotated[int, Meta(ge=1, le=_MAX_INT)]
Sizes = Annotated[tuple[_Position, ...], Meta(max_length=16)]

ImageKey = Annotated[bytes, Meta(min_length=IMAGE_KEY_BYTES, max_length=IMAGE_KEY_BYTES)]
"""BLAKE2b-256 over the preprocessed pixel values, their shape, and the grid: equal keys mean equal embeddings."""

PixelType = Literal["float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


class PixelTensor(Struct, frozen=True, array_like=True, gc=False):
    """One input tensor of the vision tower, row-major and little-endian."""

    name: ShortText  # the processor's name for it: "pixel_values", ...
    dtype: PixelType
    shape: Sizes
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
    length: Length
    num_embeddings: Length  # positions among them with the image token, where the embeddings go, in order
    grid: Sizes  # (t, h, w) in patches if position ids depend on it; other sizes otherwise
    pixels: PixelRef


class RowImage(Struct, frozen=True, array_like=True, gc=False):
    """An image of a sequence that enters a row; fields as in `ImageRef`."""

    key: ImageKey
    start: _Position
    length: Length
    num_embeddings: Length
    grid: Sizes
    embedding_id: int  # 0: this row computes none of its positions
