"""The key file of a launch whose channels go over tcp:// (see `curve.py`). Reading it needs no ZeroMQ."""

import tomllib
from pathlib import Path
from typing import NamedTuple

_KEY_CHARACTERS = 40  # of ZeroMQ's Z85


class KeyFileError(ValueError):
    """A key file that cannot be used or made; the message says why."""


class ChannelKeys(NamedTuple):
    """A launch's key pair, each key in Z85."""

    public: bytes
    secret: bytes


def read_key_file(path: Path) -> ChannelKeys:
    """The key pair of a file.

    Raises:
        KeyFileError: if it cannot be read, or others may read it.
    """
    try:
        mode = path.stat().st_mode
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise KeyFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{str(path)!r} is not a key file: {error}") from None
    if mode & 0o007:
        raise KeyFileError(f"others may read {str(path)!r}: chmod 600 it")
    keys = [raw.get(name) for name in ChannelKeys._fields]
    if any(not isinstance(key, str) or len(key) != _KEY_CHARACTERS or not key.isascii() for key in keys):
        raise KeyFileError(f"{str(path)!r} must hold the keys `public` and `secret`, of {_KEY_CHARACTERS} characters")
    return ChannelKeys(*(str(key).encode() for key in keys))
