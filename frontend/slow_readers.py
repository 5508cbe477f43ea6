"""A stream whose reader does not keep up: its output is bounded, and so is what it may hold of the engine.

keeps up --MAX_UNREAD_TOKENS unread, and nobody takes them--> paused: row and pages go to others
paused   --what was unread is taken-->  keeps up              the engine goes on with the very next token
paused   --for too long-->              closed
"""

import asyncio
from collections.abc import Callable

MAX_UNREAD_TOKENS = 256
"""As events they are about 64 KiB, as much as the connection's own buffers hold besides."""


class SlowReader:
    """The reader of one stream. Make it inside the running event loop."""

    __slots__ = ("_give_up", "_num_unread", "_pause", "_proceed", "_seconds", "_timer")

    def __init__(
        self, pause: Callable[[], None], proceed: Callable[[], None], give_up: Callable[[], None], seconds: float
    ) -> None:
        """`pause` and `proceed` are for the engine; `give_up` is called once, after a pause of so many seconds."""
        self._pause = pause
        self._proceed = proceed
        self._give_up = give_up
        self._seconds = seconds
        self._num_unread = 0  # tokens
        self._timer: asyncio.TimerHandle | None = None  # while paused

    def pushed(self, num_tokens: int, *, is_awaited: bool) -> None:
        """Output has come; `is_awaited` if the reader waits for it. (A burst for a reader who waits is no delay.)"""
        self._num_unread += num_tokens
        if self._num_unread > MAX_UNREAD_TOKENS and not is_awaited and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._give_up)
            self._pause()

    def took_all(self) -> None:
        """The reader has taken what there was."""
        self._num_unread = 0
        if self._timer is not None:
            self.close()
            self._proceed()

    def close(self) -> None:
        """Nobody waits for the reader any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
