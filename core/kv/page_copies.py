"""The page copies of the next plan, in the order in which they count as done."""

from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import FROM_HOST, ON_DEVICE, TO_HOST


class PageCopies:
    """Collects copies from all code that moves pages; a plan takes them all."""

    __slots__ = ("_dst", "_tiers", "num_from_host", "num_to_host", "src")

    def __init__(self) -> None:
        self.src: list[int] = []
        self._dst: list[int] = []
        self._tiers = bytearray()
        self.num_to_host = 0  # since the last plan
        self.num_from_host = 0

    def on_device(self, src: int, dst: int) -> None:
        """Copy a page of the device to another one."""
        self._add(src, dst, ON_DEVICE)

    def to_host(self, src: int, dst: int) -> None:
        """Copy a page of the device to the host."""
        self._add(src, dst, TO_HOST)
        self.num_to_host += 1

    def from_host(self, src: int, dst: int) -> None:
        """Copy a page of the host to the device."""
        self._add(src, dst, FROM_HOST)
        self.num_from_host += 1

    def take(self) -> tuple[bytes, bytes, bytes]:
        """Return the plan's columns `copy_src`, `copy_dst` and `copy_tiers`, and clear them."""
        tiers = bytes(self._tiers) if self.num_to_host or self.num_from_host else b""
        columns = pack_int32(self.src), pack_int32(self._dst), tiers
        self.src.clear()
        self._dst.clear()
        self._tiers.clear()
        self.num_to_host = self.num_from_host = 0
        return columns

    def _add(self, src: int, dst: int, tier: int) -> None:
        self.src.append(src)
        self._dst.append(dst)
        self._tiers.append(tier)
