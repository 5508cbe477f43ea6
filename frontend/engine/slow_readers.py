"""A stream whose reader does not keep up: its output is bounded, and so is what it may hold of the engine.

keeps up --MAX_UNREAD_TOKENS unread, and nobody takes them--> paused: row and pages go to others
paused   --what was unread is taken-->  keeps up              the engine goes on with the very next token

Who reads nothing for too long is closed by the watch over all connections.
"""

from collections.abc import Callable

MAX_UNREAD_TOKENS, MAX_UNREAD_PER_SEQUENCE = 64, 4
"""As events they are about 16 KiB. A request of many sequences has that many tokens in a single step."""


class SlowReader:
    """The reader of one stream."""

    __slots__ = ("_is_paused", "_max_unread", "_num_unread", "_pause", "_resume")

    def __init__(self, num_sequences: int, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """`pause` and `resume` are for the engine."""
        self._max_unread = max(MAX_UNREAD_TOKENS, MAX_UNREAD_PER_SEQUENCE * num_sequences)
        self._pause = pause
        self._resume = resume
        self._num_unread = 0  # tokens
        self._is_paused = False

    def pushed(self, num_tokens: int, *, is_awaited: bool) -> None:
        """Output has come; `is_awaited` if the reader waits for it. (A burst for a reader who waits is no delay.)"""
        self._num_unread += num_tokens
        if self._num_unread > self._max_unread and not is_awaited and not self._is_paused:
            self._is_paused = True
            self._pause()

    def took_all(self) -> None:
        """The reader has taken what there was."""
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            self._resume()
