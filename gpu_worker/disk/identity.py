"""What pages on a disk were computed by. Only a worker that would compute the same bytes may read them."""

from hashlib import blake2b

import msgspec

from penstock.gpu_worker.disk.segment import FORMAT_VERSION


class Identity(msgspec.Struct, frozen=True):
    """Everything that the bytes of a page depend on, beside its tokens and its namespace."""

    model: str  # fingerprint of the architecture
    weights: str  # checksum over their bytes
    dtype: str
    kernels: str
    layout: str  # of a page
    page_bytes: int
    arithmetic: str = ""  # programs and processor, as far as another one might round otherwise

    def digest(self) -> bytes:
        """32 bytes that name the identity."""
        return blake2b(self.about() + bytes([FORMAT_VERSION]), digest_size=32).digest()

    def about(self) -> bytes:
        """The same for people, as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"
