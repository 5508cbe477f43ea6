"""What is kept in the cache folder, and what is made again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.cache_folder import cache_folder, kept
from penstock.kernels.native import build

_LARGE = b"12345678" * (1 << 18)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _not_made() -> bytes:
    raise AssertionError("it was kept")


def test_it_is_made_once(folder: Path) -> None:
    assert kept("what", "a", lambda: _LARGE) == _LARGE
    assert kept("what", "a", _not_made) == _LARGE
    assert kept("what", "b", lambda: _LARGE[1:]) == _LARGE[1:], "another key"
    assert not (folder / "what-a").stat().st_mode & 0o077


_HARMS: tuple[Callable[[Path], object], ...] = (
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(b""),
    lambda path: path.chmod(0o666),
)


def test_what_is_damaged_or_could_be_somebody_elses_is_made_again(folder: Path) -> None:
    for harm in _HARMS:
        kept("what", "a", lambda: _LARGE)
        harm(folder / "what-a")
        assert kept("what", "a", lambda: _LARGE[1:]) == _LARGE[1:]
        (folder / "what-a").unlink()


def test_the_last_ones_used_are_kept(folder: Path) -> None:
    for number in range(18):
        if number == 16:
            kept("what", "0", _not_made)  # used again
        kept("what", str(number), lambda: _LARGE)
        for place, path in enumerate(sorted(folder.glob("what-*"), key=lambda each: each.stat().st_mtime_ns)):
            os.utime(path, (place, place))  # clocks of file systems are coarse
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 16
    assert {"what-0", "what-17"} <= names
    assert "what-1" not in names


def test_a_folder_that_cannot_be_written_to_costs_only_time(folder: Path) -> None:
    folder.write_text("a file")
    assert kept("what", "a", lambda: _LARGE) == _LARGE
    assert kept("what", "a", lambda: _LARGE) == _LARGE


def test_small_things_are_not_kept(folder: Path) -> None:
    assert kept("what", "a", lambda: b"small") == b"small"
    assert not folder.exists()


def test_the_kernels_are_in_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their build runs before anything is installed, and says it by itself."""
    assert build._cache_folder() == cache_folder()
    monkeypatch.delenv("PENSTOCK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._cache_folder() == cache_folder() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build._cache_folder() == cache_folder()
