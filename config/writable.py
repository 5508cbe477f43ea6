"""Whether files can be written, tried before anything is loaded, so that a full disk is reported at once."""

from pathlib import Path

TRIAL = b"\n" * 4096  # one block: a full file system accepts an empty file, but not this


def try_to_write(path: Path) -> None:
    """Write something to a file, and leave it empty.

    Raises:
        OSError: with the system's reason.
    """
    with path.open("wb") as file:
        file.write(TRIAL)
        file.flush()
        if file.seekable():
            file.truncate(0)
