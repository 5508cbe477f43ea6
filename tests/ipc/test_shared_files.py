"""Files in shared memory: bounded, read by others, and gone however their owner ends."""

import os
import subprocess
import sys

import pytest

from penstock.ipc import shared_files
from penstock.ipc.shared_files import NoRoomError, SharedFiles, clear_leftovers, shared_folder


def test_what_is_written_is_read_until_it_is_removed() -> None:
    files = SharedFiles(10)
    name = files.reserve(6)
    shared_files.write(name, [b"abc", memoryview(b"def")])
    mode = (shared_folder() / name).stat().st_mode & 0o777
    data = shared_files.read(name, 6)
    files.remove(name)
    assert (bytes(data), mode, files.num_bytes, len(files)) == (b"abcdef", 0o600, 0, 0)
    with pytest.raises(FileNotFoundError):
        shared_files.read(name, 6)
    files.close()


def test_the_owner_has_a_limit() -> None:
    files = SharedFiles(10)
    first = files.reserve(7)
    with pytest.raises(NoRoomError, match="7 of 10 bytes"):
        files.reserve(4)
    files.remove(first)  # never written
    files.reserve(10)
    files.close()


def test_a_reader_takes_no_other_names_sizes_or_links() -> None:
    files = SharedFiles(10)
    name = files.reserve(3)
    shared_files.write(name, [b"abc"])
    for wrong in ("/etc/passwd", "../x", f"{name}/..", name.split("/")[0] + "/owner", "penstock-shared-0/../x"):
        with pytest.raises(ValueError, match="is not the name"):
            shared_files.read(wrong, 1)
    with pytest.raises(ValueError, match="3 bytes"):
        shared_files.read(name, 4)
    linked = files.reserve(3)
    os.symlink(shared_folder() / name, shared_folder() / linked)
    with pytest.raises(OSError, match="symbolic links"):
        shared_files.read(linked, 3)
    files.close()


_OWNER = """
from penstock.ipc import shared_files
files = shared_files.SharedFiles(100)
name = files.reserve(5)
shared_files.write(name, [b"abcde"])
print(name, flush=True)
input()
"""


def test_files_of_the_dead_are_cleared_and_those_of_the_living_stay() -> None:
    alive = SharedFiles(10)
    mine = alive.reserve(2)
    shared_files.write(mine, [b"ab"])
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    clear_leftovers()
    assert shared_files.read(name, 5) == b"abcde"
    owner.kill()
    owner.communicate()
    clear_leftovers()  # or somebody else's, at the same time
    assert not (shared_folder() / name).parent.exists()
    assert shared_files.read(mine, 2) == b"ab"
    folder = (shared_folder() / mine).parent
    alive.close()
    assert not folder.exists()
