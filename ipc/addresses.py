"""Where the processes of one launch meet: `ipc://` sockets in a private folder, unless addresses are given."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MAX_IPC_PATH = 107  # sun_path holds 108 bytes including the final zero


class AddressError(ValueError):
    """An address that cannot be used; the message says why."""


@contextlib.contextmanager
def private_dir(wanted: str = "") -> Iterator[Path]:
    """A folder of mode 0700 for sockets: `wanted` (kept afterwards), or a fresh one (removed afterwards).

    Raises:
        AddressError: if it cannot be made, or `wanted` is open to others.
    """
    if not wanted:
        try:
            folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        except OSError as error:
            raise AddressError(f"cannot make a folder for sockets: {error.strerror}") from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    folder = Path(wanted)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AddressError(f"cannot make the folder {wanted!r} for sockets: {error.strerror}") from None
    if folder.stat().st_mode & 0o077:
        raise AddressError(f"{wanted!r} must be accessible to its owner only (mode 0700)")
    yield folder


def addresses_in(text: str) -> list[str]:
    """The comma-separated addresses in an option: one for each engine, in the order of the engines' numbers."""
    return [address.strip() for address in text.split(",")]


def is_tcp(address: str) -> bool:
    """Whether processes of other machines or users could reach it."""
    return address.startswith("tcp://")


def ipc_address(folder: Path, name: str) -> str:
    """The address of a socket file in `folder`.

    Raises:
        AddressError: if the path is too long for a Unix socket, or could be taken for two addresses.
    """
    path = folder / f"{name}.sock"
    if "," in str(path):
        raise AddressError(f"socket path {str(path)!r} has a comma, which separates addresses")
    if len(str(path).encode()) > _MAX_IPC_PATH:
        raise AddressError(f"socket path {str(path)!r} is longer than {_MAX_IPC_PATH} bytes")
    return f"ipc://{path}"
