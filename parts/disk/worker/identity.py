"""Identifies what computed the pages on a disk. Only a worker that would compute the same bytes may read them."""

from hashlib import blake2b

import msgspec

from penstock.parts.disk.worker.segment import FORMAT_VERSION


class Identity(msgspec.Struct, frozen=True):
    """Everything on which the bytes of a page depend, besides its tokens and its namespace."""

    model: str  # fingerprint of the architecture
    weights: str  # checksum of their bytes
    dtype: str
    kernels: str
    layout: str  # of a page
    page_bytes: int
    arithmetic: str = ""  # libraries and processor, as far as others might round differently

    def digest(self) -> bytes:
        """32 bytes that name the identity."""
        return blake2b(self.about() + bytes([FORMAT_VERSION]), digest_size=32).digest()

    def about(self) -> bytes:
        """The identity in readable form, as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"
