"""Who is connected to one of the scheduler's sockets, and when each was last heard."""

from penstock.ipc.channel import PeerId


class Peers:
    """Peers that have said hello, in the order of their hellos."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last_seen: dict[PeerId, float] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._last_seen

    def seen(self, peer: PeerId, now: float) -> None:
        """A message of `peer` came (its hello, to begin with)."""
        self._last_seen[peer] = now

    def forget(self, peer: PeerId) -> None:
        """It left, or counts as gone."""
        self._last_seen.pop(peer, None)

    def all(self) -> list[PeerId]:
        """All of them, safe to change the set while iterating."""
        return list(self._last_seen)

    def silent(self, now: float) -> list[PeerId]:
        """Those not heard for longer than the timeout."""
        return [peer for peer, seen in self._last_seen.items() if now - seen > self._timeout]
