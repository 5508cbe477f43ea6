"""Whose turn it is on a device that steps and a vision tower share."""

_STEPS_SHARE = 2.0
"""While there are steps, they get so many times the time that the tower has had: beside a flood of images streams go on
at two thirds of their speed."""


class Turns:
    """The tower goes on when steps have had their share, or when there are none."""

    def __init__(self) -> None:
        self._owed = 0.0  # seconds of steps that come before the tower
        self._is_alone = True

    @property
    def is_towers(self) -> bool:
        """Whether the tower may go on."""
        return self._owed <= 0

    def encoded(self, seconds: float) -> None:
        """The tower has had so much."""
        if not self._is_alone:
            self._owed = seconds * _STEPS_SHARE

    def stepped(self, seconds: float) -> None:
        """A step has taken so much."""
        self._owed -= seconds
        self._is_alone = False

    def idle(self) -> None:
        """No step has come in time."""
        self._owed = 0.0
        self._is_alone = True
