"""When a vision tower goes on, on a device that it shares with steps."""

_STEPS_SHARE = 2.0
"""While there are steps, the tower stays away for so many times the time that it has just had: beside a flood of images
streams go on at about two thirds of their speed."""


class Turns:
    """The tower's. Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._not_before = 0.0
        self._are_shared = False  # whether there has been a step since the tower's last turn

    def is_towers(self, now: float) -> bool:
        """Whether the tower may go on."""
        return now >= self._not_before

    def stepped(self) -> None:
        """A step has been computed."""
        self._are_shared = True

    def encoded(self, began: float, ended: float) -> None:
        """The tower has had its turn."""
        self._not_before = ended + (ended - began) * _STEPS_SHARE if self._are_shared else ended
        self._are_shared = False
