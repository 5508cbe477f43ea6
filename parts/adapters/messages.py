"""What frontends ask of engines for adapters, and engines of workers, and what they tell of them.

An adapter has a key, NAME@VERSION (`keys.py`). A request names the key of its adapter (`AddRequest.adapter`), and a
frontend sends `LoadAdapter` before the first such request.
"""

from typing import Literal

from msgspec import Struct

from penstock.ipc.messages import Message, ShortText


class LoadAdapter(Message, frozen=True):
    """Have an adapter ready. Idempotent; `AdapterNews` says when it is ready, or why it cannot be."""

    key: ShortText
    path: str  # of its folder, as workers reach it
    is_leaving: bool = False  # only for requests that began with it elsewhere; it stays until it is unloaded


class UnloadAdapter(Message, frozen=True):
    """Let an adapter go, once its requests have ended. Idempotent; an unknown key is fine."""

    key: ShortText
    abort: bool = False  # end its requests with an error


AdapterStage = Literal["loading", "ready", "failed", "leaving"]
"""Leaving: it takes no new requests, and goes when those that it has have ended."""


class AdapterState(Struct, frozen=True, array_like=True, gc=False):
    """One adapter of an engine."""

    key: str
    path: str
    state: AdapterStage
    error: str = ""  # why it failed: one sentence
    rank: int = 0  # the largest of its modules
    num_running: int = 0  # sequences that have a row
    num_waiting: int = 0


class AdapterNews(Message, frozen=True):
    """All adapters of an engine. Sent behind a hello, and to all frontends when something of it changes."""

    adapters: tuple[AdapterState, ...]


class PrepareAdapter(Message, frozen=True):
    """Read an adapter while steps go on; `AdapterPrepared` answers. No row uses it before that.

    The worker keeps it until it is dropped, or until the worker says hello again.
    """

    adapter_id: int  # never reused
    path: str
    key: ShortText = ""  # by which the host's memory keeps what was read


class DropAdapter(Message, frozen=True):
    """No row will use this adapter any more. If it is still being read, `AdapterPrepared` comes nevertheless."""

    adapter_id: int


class ForgetAdapter(Message, frozen=True):
    """Nobody will ask for an adapter of this key again, until it is loaded again."""

    key: ShortText


class AdapterPrepared(Message, frozen=True):
    """An adapter is ready for rows, or cannot be used."""

    adapter_id: int
    error: str = ""  # why not, for whoever asked for it
    rank: int = 0  # the largest of its modules


FROM_FRONTEND = (LoadAdapter, UnloadAdapter)
TO_FRONTEND = (AdapterNews,)
TO_WORKER = (PrepareAdapter, DropAdapter, ForgetAdapter)
FROM_WORKER = (AdapterPrepared,)
