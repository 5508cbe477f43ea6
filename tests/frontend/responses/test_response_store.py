"""Stored responses: bounded for each owner, shared by processes, not lost with one, and no reason for a failure."""

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import Config, ConfigError, IpcOptions
from penstock.config.api_keys import digest
from penstock.frontend.errors import PreviousResponseNotFound, ResponseNotFound
from penstock.frontend.storage.database import FILE_NAME, Database
from penstock.parts.responses.frontend.storage import own_file
from penstock.parts.responses.frontend.storage.conversations import ConversationStore
from penstock.parts.responses.frontend.storage.own_file import OwnFile
from penstock.parts.responses.frontend.storage.responses import Item, ResponseStore, store_path
from tests.frontend.http_client import error_of, get, post, send
from tests.frontend.live_server import live_server

ITEMS: list[Item] = [
    {"id": "a", "content": "one"},
    {"id": "b", "content": [{"text": "two"}]},
    {"id": "c", "content": "three"},
]


async def put(store: ResponseStore, owner: str, name: str, response: bytes = b"{}") -> None:
    await store.put(owner, name, response, ITEMS, num_before=1, num_inputs=1)


def _close(store: ResponseStore) -> None:
    assert isinstance(store._tables, OwnFile)
    store._tables.close()


async def names(store: ResponseStore, owner: str, asked: str) -> str:
    """Those of the asked ones that are there; each letter is a response."""
    found = ""
    for name in asked:
        try:
            await store.get(owner, name)
        except ResponseNotFound:
            continue
        found += name
    return found


async def items_of(store: ResponseStore, owner: str, item_ids: list[str]) -> dict[str, Any]:
    """What `items` finds, decoded."""
    return {item_id: msgspec.json.decode(item) for item_id, item in (await store.items(owner, item_ids)).items()}


async def test_what_is_put_is_found() -> None:
    store = ResponseStore(OwnFile(":memory:"), 10, 1 << 20)
    await put(store, "me", "first", b'{"id": "first"}')
    stored = await store.previous("me", "first")
    assert (stored.response, stored.conversation(), stored.inputs()) == (b'{"id": "first"}', ITEMS, ITEMS[1:2])
    assert stored.num_values == 19
    assert await items_of(store, "me", ["c", "a", "none"]) == {"c": ITEMS[2], "a": ITEMS[0]}
    assert await items_of(store, "other", ["c"]) == {}
    for missing in (store.previous("other", "first"), store.previous("me", "second")):
        with pytest.raises(PreviousResponseNotFound):
            await missing
    with pytest.raises(ResponseNotFound):
        await store.delete("other", "first")
    await store.delete("me", "first")
    with pytest.raises(ResponseNotFound):
        await store.get("me", "first")
    _close(store)


async def test_an_owner_has_a_number_of_his_own() -> None:
    store = ResponseStore(OwnFile(":memory:"), 3, 1 << 20)
    await put(store, "alice", "a")
    for name in "abcde":
        await put(store, "bob", name)
    assert await names(store, "bob", "abcde") == "cde"
    assert await names(store, "alice", "a") == "a"
    await store.get("bob", "c")  # used, so "d" goes first
    await put(store, "bob", "f")
    assert await names(store, "bob", "abcdef") == "cef"
    _close(store)


async def test_an_owner_has_bytes_of_his_own() -> None:
    store = ResponseStore(OwnFile(":memory:"), 10, 1000)
    await put(store, "alice", "a", b"x" * 700)
    for name in "abc":
        await put(store, "bob", name, b"x" * 300)
    assert await names(store, "bob", "abc") == "bc"
    await put(store, "bob", "d", b"x" * 2000)
    assert await names(store, "bob", "bcd") == "bc"
    assert await names(store, "alice", "a") == "a"
    _close(store)


async def num_indexed(tables: OwnFile | Database) -> int:
    [count] = await tables.read(lambda file: file.execute("SELECT count(*) FROM response_items").fetchone())
    return int(count)


async def test_items_are_looked_up_without_reading_what_is_stored() -> None:
    """However much an owner has stored, and whether an item is there or not."""
    tables = OwnFile(":memory:")
    store = ResponseStore(tables, 10, 1 << 20)
    await put(store, "me", "first")
    asked: list[str] = []
    await tables.read(lambda file: file.set_trace_callback(asked.append))
    assert await items_of(store, "me", ["c", "a", "none"]) == {"c": ITEMS[2], "a": ITEMS[0]}
    await tables.read(lambda file: file.set_trace_callback(None))
    assert len(asked) == 1 + 2  # "a" is beside "c"; "none" might be in a conversation
    for statement in asked:
        plan = await tables.read(lambda file, s=statement: file.execute(f"EXPLAIN QUERY PLAN {s}").fetchall())  # type: ignore[misc]
        searches = [
            line for *_, line in plan if "SUBQUERY" not in line and "VIRTUAL" not in line
        ]  # the latter: in a row
        assert searches
        assert all("SEARCH" in line and "(owner=? AND id=?)" in line for line in searches)
    _close(store)


async def test_items_are_forgotten_with_their_response() -> None:
    tables = OwnFile(":memory:")
    store = ResponseStore(tables, 2, 1 << 20)
    await put(store, "me", "first")
    await put(store, "me", "first")
    assert await num_indexed(tables) == 3
    await put(store, "me", "second")
    await store.delete("me", "first")
    assert await items_of(store, "me", ["a"]) == {"a": ITEMS[0]}  # the other one has it, too
    for name in ("third", "fourth"):
        await store.put("me", name, b"{}", [{"id": name, "content": ""}], num_before=0, num_inputs=1)
    assert await items_of(store, "me", ["a"]) == {}
    assert await num_indexed(tables) == 2
    _close(store)


async def test_the_item_that_was_stored_last_counts() -> None:
    store = ResponseStore(OwnFile(":memory:"), 10, 1 << 20)
    for name, content in (("first", "old"), ("second", "new")):
        items: list[Item] = [{"id": "a", "content": content}, {"id": name, "content": ""}]
        await store.put("me", name, b"{}", items, num_before=0, num_inputs=1)
    assert (await items_of(store, "me", ["a", "first"]))["a"]["content"] == "new"
    _close(store)


async def test_items_of_conversations_are_found() -> None:
    tables = OwnFile(":memory:")
    store, conversations = ResponseStore(tables, 10, 1 << 20), ConversationStore(tables, 10, 1 << 20)
    made = await conversations.create("me", {}, ITEMS)
    assert await items_of(store, "me", ["b", "none"]) == {"b": ITEMS[1]}
    assert await items_of(store, "other", ["b"]) == {}
    await conversations.delete("me", made.id)
    assert await items_of(store, "me", ["b"]) == {}
    _close(store)


@pytest.mark.parametrize("is_own", [False, True])
async def test_items_of_older_versions_are_found(is_own: bool, tmp_path: Path) -> None:
    def opened() -> OwnFile | Database:
        return OwnFile(str(tmp_path / FILE_NAME)) if is_own else Database(tmp_path)

    tables = opened()
    await put(ResponseStore(tables, 10, 1 << 20), "me", "first")
    tables.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as file:
        file.execute("DROP TABLE response_items")
        file.execute("DROP INDEX items_of_owner")
        if not is_own:
            file.execute("PRAGMA user_version = 3")
    for tables in (opened(), opened()):  # the second one finds nothing to do
        store = ResponseStore(tables, 10, 1 << 20)
        assert await items_of(store, "me", ["c", "a"]) == {"c": ITEMS[2], "a": ITEMS[0]}
        assert await num_indexed(tables) == 3
    await store.delete("me", "first")
    assert await num_indexed(tables) == 0
    tables.close()


async def test_two_frontends_and_their_deaths(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    first, second = ResponseStore(OwnFile(path), 100, 1 << 20), ResponseStore(OwnFile(path), 100, 1 << 20)
    assert os.stat(path).st_mode & 0o077 == 0
    await asyncio.gather(*(put(store, "me", f"{store is first}-{i}") for i in range(20) for store in (first, second)))
    for i in range(20):
        assert (await second.get("me", f"True-{i}")).conversation() == ITEMS
        assert (await first.get("me", f"False-{i}")).conversation() == ITEMS
    third = ResponseStore(OwnFile(path), 100, 1 << 20)  # as after a death: nobody has closed the file
    await third.get("me", "True-0")
    for store in (first, second, third):
        _close(store)


async def test_a_disk_that_is_gone_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(OwnFile(str(path)), 10, 1 << 20)
    path.write_bytes(b"no database")
    path.with_name("responses.sqlite-wal").write_bytes(b"")
    await put(store, "me", "a")
    _close(store)


async def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = own_file._open

    def open_without_room(path: str) -> sqlite3.Connection:
        if path == ":memory:":
            return opened(path)
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(own_file, "_open", open_without_room)
    store = ResponseStore(OwnFile(str(tmp_path / "responses.sqlite")), 10, 1 << 20)
    await put(store, "me", "a")
    assert await names(store, "me", "a") == "a"
    _close(store)


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stored responses"):
        ResponseStore(OwnFile(str(tmp_path / "none" / "file")), 10, 1000)
    (tmp_path / "text").write_text("this is no database" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        ResponseStore(OwnFile(str(tmp_path / "text")), 10, 1000)


def test_where_the_file_is(tmp_path: Path) -> None:
    beside = Config(ipc=IpcOptions(frontend_address=f"ipc://{tmp_path}/frontends.sock"))
    assert store_path(beside) == str(tmp_path / "responses.sqlite")
    assert store_path(Config(ipc=IpcOptions(frontend_address="tcp://scheduler:5551"))) == ":memory:"


def test_a_response_is_its_key_s_alone(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entries = [f'[[keys]]\nid = "{key}"\nsha256 = "{digest(key).hex()}"\nscopes = ["infer"]\n' for key in ("a", "b")]
    keys.write_text("".join(entries))
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(keys)}) as live:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        path = "/v1/responses/" + post(live, "/v1/responses", {"input": "Hello"}, **mine).json()["id"]
        assert error_of(get(live, path, **other), 404)["code"] == "response_not_found"
        assert error_of(send(live, "DELETE", path, None, **other), 404)["code"] == "response_not_found"
        body = {"input": "Go on", "previous_response_id": path.rpartition("/")[2]}
        assert error_of(post(live, "/v1/responses", body, **other), 400)["code"] == "previous_response_not_found"
        assert get(live, path, **mine).status == 200
        assert post(live, "/v1/responses", body, **mine).status == 200


def test_responses_are_there_after_a_restart(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path / "kept")}
    with live_server(checkpoint, sockets, frontend=options) as live:
        found = post(live, "/v1/responses", {"input": "Hello"}).json()
    with live_server(checkpoint, sockets, frontend=options) as live:
        assert get(live, f"/v1/responses/{found['id']}").json() == found
