"""Limits how much may be sent per time."""


class Bucket:
    """A leaky bucket: `rate` units a second on average, `most` of them at once."""

    __slots__ = ("_at", "_most", "_rate", "_room")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate = rate
        self._most = self._room = most
        self._at = now

    def has_room(self, units: float, now: float) -> bool:
        """Whether this many units may be sent now."""
        if now > self._at:
            self._room = min(self._most, self._room + (now - self._at) * self._rate)
            self._at = now
        return units <= self._room

    def use(self, units: float) -> None:
        """Count units as sent; there must have been room for them."""
        self._room -= units

    def take(self, units: float, now: float) -> bool:
        """Use units if there is room; False if there is none."""
        if not self.has_room(units, now):
            return False
        self._room -= units
        return True
