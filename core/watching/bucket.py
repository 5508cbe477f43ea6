"""How much may be told in a time."""


class Bucket:
    """A leaky bucket: `rate` units a second on average, `most` of them at once."""

    __slots__ = ("_at", "_most", "_rate", "_room")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate = rate
        self._most = self._room = most
        self._at = now

    def has_room(self, units: float, now: float) -> bool:
        """Whether so many units may be told."""
        if now > self._at:
            self._room = min(self._most, self._room + (now - self._at) * self._rate)
            self._at = now
        return units <= self._room

    def use(self, units: float) -> None:
        """They are told; there was room for them."""
        self._room -= units

    def take(self, units: float, now: float) -> bool:
        """Both in one: False if there is no room."""
        if not self.has_room(units, now):
            return False
        self._room -= units
        return True
