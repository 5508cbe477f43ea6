"""Where is kept what can be made again, but takes a while: `$PENSTOCK_CACHE_DIR`, or a folder in the user's cache.

Other users must not have been able to write what is read from it.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MAX_KEPT = 16
_LEAST_BYTES = 1 << 20  # what is smaller is made as quickly as it is read
_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """`$PENSTOCK_CACHE_DIR`, or `penstock` in the user's cache folder."""
    if chosen := os.environ.get("PENSTOCK_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def kept(kind: str, key: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns, from the cache folder if an earlier call has put it there.

    Of each kind, the 16 that were used last are kept. A folder that cannot be written to, or what is damaged in it,
    costs the time to make it again.

    Args:
        kind: begins the file's name.
        key: a digest of all that the result depends on.
    """
    path = cache_folder() / f"{kind}-{key}"
    with suppress(OSError):
        if (found := _read(path)) is not None:
            os.utime(path)
            return found
    made = make()
    if len(made) >= _LEAST_BYTES:
        with suppress(OSError):
            _write(path, made)
            for old in sorted(path.parent.glob(f"{kind}-*"), key=lambda each: each.stat().st_mtime_ns)[:-_MAX_KEPT]:
                old.unlink()
    return made


def _is_ours(path: Path) -> bool:
    """Whether no other user could have written the file."""
    stat = path.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


def _read(path: Path) -> bytes | None:
    if not _is_ours(path):
        return None
    whole = path.read_bytes()
    digest, content = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    return content if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() == digest else None


def _write(path: Path, content: bytes) -> None:
    """Write under another name first: other processes see a whole file or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content)
        made.chmod(0o600)
        made.rename(path)
