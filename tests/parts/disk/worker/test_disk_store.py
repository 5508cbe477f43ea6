"""The disk tier's files: what was written is found again or missing, whatever happens to them in between."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.parts.disk.worker.identity import Identity
from penstock.parts.disk.worker.segment import DamagedError
from penstock.parts.disk.worker.store import DiskStore, Held, open_store, pages_within, shape_of

PAGE_BYTES = 3000
IDENTITY = Identity("model", "weights", "float32", "torch", "layout", PAGE_BYTES)
BUDGET = shape_of(IDENTITY).data_offset + 20 * PAGE_BYTES + 17


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def page_of(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "little") * (PAGE_BYTES // 4))


def opened(root: Path, identity: Identity = IDENTITY, budget: int = BUDGET) -> DiskStore:
    store = open_store(root, identity, budget)
    assert store is not None
    return store


def filled(root: Path, numbers: range) -> None:
    """Write page n at place n."""
    store = opened(root)
    for number in numbers:
        write(store, number, key_of(number + 1), page_of(number + 1))
    store.close()


def read(store: DiskStore, held: Held) -> memoryview:
    page = memoryview(bytearray(PAGE_BYTES))
    store.read(held.place, held.key, page, store.take_stamps(1)[0])
    return page


def write(store: DiskStore, place: int, key: bytes, page: memoryview) -> None:
    store.write(place, key, page, store.take_stamps(1)[0])


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


def test_pages_survive_in_the_order_of_their_use(tmp_path: Path) -> None:
    assert pages_within(IDENTITY, BUDGET) == 20
    filled(tmp_path, range(5))
    store = opened(tmp_path)
    assert [each.place for each in store.held()] == [0, 1, 2, 3, 4]
    assert all(read(store, each) == page_of(each.place + 1) for each in store.held())
    assert read(store, Held(1, key_of(2))) == page_of(2)
    write(store, 3, key_of(99), page_of(99))
    store.close()
    store = opened(tmp_path)
    assert store.held() == [
        Held(0, key_of(1)), Held(2, key_of(3)), Held(4, key_of(5)), Held(1, key_of(2)), Held(3, key_of(99)),
    ]  # fmt: skip
    with pytest.raises(DamagedError):
        read(store, Held(3, key_of(4)))  # it was overwritten
    assert {path.stat().st_mode & 0o777 for path in [*files(tmp_path), *tmp_path.glob("*/lock")]} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}
    assert sum(path.stat().st_size for path in files(tmp_path)) <= BUDGET
    store.drop_all()
    write(store, 0, key_of(7), page_of(7))
    store.close()
    store = opened(tmp_path)
    assert store.held() == [Held(0, key_of(7))]
    store.close()


def test_many_files_and_a_smaller_budget(tmp_path: Path) -> None:
    identity = Identity("model", "weights", "float32", "torch", "layout", 9 << 20)  # 7 in a file
    shape = shape_of(identity)
    assert shape.capacity == 7
    page = memoryview(bytes([3]) * identity.page_bytes)
    store = opened(tmp_path, identity, 3 * shape.num_bytes)
    assert store.num_pages == 21
    for place in (0, 6, 7, 13, 14, 20):
        write(store, place, key_of(place + 1), page)
    store.close()
    store = opened(tmp_path, identity, 2 * shape.num_bytes - 4 * identity.page_bytes)
    assert store.num_pages == 10
    assert [each.place for each in store.held()] == [0, 6, 7]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * shape.num_bytes - 4 * identity.page_bytes
    store.close()
    store = opened(tmp_path, identity, 3 * shape.num_bytes)
    assert [each.place for each in store.held()] == [0, 6, 7]
    store.close()


def test_others_are_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    (mine,) = files(tmp_path)
    stranger = mine.parent / "notes.txt"
    stranger.write_text("not ours")
    other = opened(tmp_path, Identity("model", "other weights", "float32", "torch", "layout", PAGE_BYTES))
    assert other.held() == []
    write(other, 0, key_of(1), page_of(8))
    store = opened(tmp_path)
    assert len(store.held()) == 3
    assert stranger.read_text() == "not ours"
    assert open_store(tmp_path, IDENTITY, BUDGET) is None, "one worker at a time"
    store.close()
    other.close()
    store = opened(tmp_path)
    assert len(store.held()) == 3
    store.close()


def test_a_file_of_a_later_version_is_not_touched(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[8] = 200
    file.write_bytes(content)
    store = opened(tmp_path)
    assert store.held() == []
    assert store.unusable() == list(range(20))
    with pytest.raises(OSError, match="later version"):
        write(store, 0, key_of(1), page_of(1))
    store.close()
    assert file.read_bytes() == content


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_a_miss(data: st.DataObject) -> None:
    """Flip bits, cut the file, insert bytes: a page is what was written, or is not there."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        filled(root, range(6))
        (file,) = files(root)
        content = bytearray(file.read_bytes())
        data_offset = shape_of(IDENTITY).data_offset
        places = st.one_of(
            st.integers(0, 128 + 7 * 40), st.integers(data_offset, len(content) - 1), st.integers(0, len(content) - 1)
        )
        for place in data.draw(st.lists(places, max_size=4)):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        if data.draw(st.booleans()):
            del content[data.draw(places) :]
        if data.draw(st.booleans()):
            place = data.draw(places)
            content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        file.write_bytes(content)
        store = opened(root)
        for held in store.held():
            try:
                page = read(store, held)
            except DamagedError:
                continue
            number = int.from_bytes(held.key, "little")
            assert page == page_of(number)
        for place in set(range(6)) - set(store.unusable()):
            write(store, place, key_of(50 + place), page_of(50 + place))
            assert read(store, Held(place, key_of(50 + place))) == page_of(50 + place)
        store.close()


def test_damage_while_it_is_open(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for place in range(4):
        write(store, place, key_of(place + 1), page_of(place + 1))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[shape_of(IDENTITY).data_offset + PAGE_BYTES] ^= 1
    file.write_bytes(content[: len(content) - 1])
    assert read(store, Held(0, key_of(1))) == page_of(1)
    for place in (1, 3):
        with pytest.raises(DamagedError):
            read(store, Held(place, key_of(place + 1)))
    assert read(store, Held(2, key_of(3))) == page_of(3)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read(store, Held(0, key_of(1)))
    write(store, 5, key_of(6), page_of(6))
    assert read(store, Held(5, key_of(6))) == page_of(6)
    with pytest.raises(DamagedError):
        read(store, Held(2, key_of(3)))
    store.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_store(tmp_path / "file", IDENTITY, BUDGET) is None
    assert open_store(tmp_path, IDENTITY, PAGE_BYTES) is None, "no room for a page"


def in_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    lines = f"""
    import sys
    from pathlib import Path
    from tests.parts.disk.worker.test_disk_store import *
    {textwrap.indent(textwrap.dedent(code), "    ").strip()}
    """
    command = [sys.executable, "-c", textwrap.dedent(lines), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: only the pages that do not fit are missing."""
    limit = shape_of(IDENTITY).data_offset + 3 * PAGE_BYTES + 100
    code = """
    store = opened(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    for place in (0, 1, 2, 3, 4, 1):
        try:
            write(store, place, key_of(place + 10), page_of(place + 10))
        except OSError as error:
            print(place, error.errno, flush=True)
    print([each.place for each in store.held()])
    """
    process = in_process(code, tmp_path, limit)
    assert process.communicate()[0].splitlines() == ["3 27", "4 27", "[0, 2, 1]"]
    store = opened(tmp_path)
    assert all(read(store, held) == page_of(held.place + 10) for held in store.held())
    assert [held.place for held in store.held()] == [0, 2, 1]
    store.close()


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    """Whenever a process is killed, every page in the folder is a whole one, and the next process gets the lock."""
    code = """
    store = opened(Path(sys.argv[1]))
    print("ready", flush=True)
    number = int(sys.argv[2])
    while True:
        number += 1
        write(store, number % 20, key_of(number), page_of(number))
    """
    num_found = 0
    for attempt in range(4):
        process = in_process(code, tmp_path, attempt * 1_000_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(0.02 + 0.013 * attempt)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = opened(tmp_path)
        held = store.held()
        num_found += len(held)
        assert len(held) >= 19 or attempt == 0, "at most the page being written is missing"
        for each in held:
            assert read(store, each) == page_of(int.from_bytes(each.key, "little"))
        store.close()
    assert num_found > 40
    assert os.path.exists(tmp_path)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
