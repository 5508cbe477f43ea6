"""/v1/files: stored once they are whole, seen by their owner alone, within limits, never whole in memory."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.config.api_keys import digest
from penstock.frontend.errors import MalformedBody
from penstock.parts.batches.frontend.files.handlers import files_of
from penstock.parts.batches.frontend.files.multipart import FormReader, _parameter
from penstock.parts.batches.frontend.files.store import PIECE_BYTES, Limits, NewFile
from tests.frontend.http_client import Response, error_of, get, send
from tests.frontend.live_server import LiveServer, live_server

KEYS = "".join(f'[[keys]]\nid = "{name}"\nsha256 = "{digest(name).hex()}"\n' for name in ("ann", "bob"))
LIMITS = {"max_file_bytes": 1 << 20, "max_files": 3}
CONTENT = b"\r\n--not the end\r\n" * 1000


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "keys.toml").write_text(KEYS)
    options = {"data_dir": str(folder / "data"), "api_keys_file": str(folder / "keys.toml"), "max_files_bytes": 2 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.parts.batches.frontend.files.handlers.Limits", partial(Limits, **LIMITS))
        with live_server(checkpoint, tmp_path_factory.mktemp("s"), frontend=options) as live:
            yield live


@pytest.fixture
def ann(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="ann", max_retries=0, timeout=60) as client:
        yield client
        for each in client.files.list().data:
            client.files.delete(each.id)


@pytest.fixture
def bob(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="bob", max_retries=0, timeout=60) as client:
        yield client


def stored(server: LiveServer) -> list[Path]:
    assert server.server.service.database is not None
    return sorted((server.server.service.database.folder / "files").iterdir())


def form(*fields: tuple[str, str], content: bytes = b"{}\n", boundary: str = "xyz", filename: str = "a.jsonl") -> bytes:
    body = b""
    for name, value in fields:
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    return body + head.encode() + content + f"\r\n--{boundary}--\r\n".encode()


def upload(server: LiveServer, body: bytes, **headers: str) -> Response:
    given = {"Content-Type": "multipart/form-data; boundary=xyz", "Authorization": "Bearer ann"} | headers
    return send(server, "POST", "/v1/files", body, **given)


def test_what_is_uploaded_comes_back(ann: openai.OpenAI, server: LiveServer) -> None:
    made = ann.files.create(file=("dir/täst.jsonl", CONTENT), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("täst.jsonl", len(CONTENT), "batch", "processed")
    assert made.object == "file"
    assert made.expires_at is None
    assert ann.files.retrieve(made.id) == made
    assert ann.files.content(made.id).content == CONTENT
    assert [path.name for path in stored(server)] == [made.id]
    assert send(server, "HEAD", f"/v1/files/{made.id}/content", Authorization="Bearer ann").content == b""
    assert ann.files.delete(made.id).deleted
    assert not stored(server)
    with pytest.raises(openai.NotFoundError):
        ann.files.content(made.id)


def test_a_file_is_its_owners_alone(ann: openai.OpenAI, bob: openai.OpenAI) -> None:
    made = ann.files.create(file=b"{}", purpose="batch")
    assert bob.files.list().data == []
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert ann.files.retrieve(made.id) == made


def test_files_are_listed_in_pages(ann: openai.OpenAI) -> None:
    ids = [ann.files.create(file=(f"{i}", b"{}"), purpose="batch").id for i in range(3)]
    assert [each.id for each in ann.files.list(limit=2)] == ids[::-1]  # all pages
    assert [each.id for each in ann.files.list(order="asc", after=ids[0])] == ids[1:]
    assert ann.files.list(purpose="batch_output").data == []
    page = ann.files.list(limit=2)
    assert page.has_more
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "file-none"}):
        with pytest.raises(openai.BadRequestError):
            ann.files.list(**wrong)


def test_an_owner_has_limits(ann: openai.OpenAI, bob: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.APIStatusError) as too_large:
        ann.files.create(file=b"x" * (LIMITS["max_file_bytes"] + 1), purpose="batch")
    assert too_large.value.status_code == 413
    for _ in range(2):
        ann.files.create(file=b"x" * LIMITS["max_file_bytes"], purpose="batch")
    with pytest.raises(openai.BadRequestError, match="exceed"):
        ann.files.create(file=b"xx", purpose="batch")
    made = bob.files.create(file=b"xx", purpose="batch")
    bob.files.delete(made.id)
    for each in ann.files.list():
        ann.files.delete(each.id)
    for _ in range(LIMITS["max_files"]):
        ann.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="at most 3"):
        ann.files.create(file=b"x", purpose="batch")
    assert len(stored(server)) == LIMITS["max_files"]  # what was refused has left nothing


def test_a_file_may_expire(ann: openai.OpenAI, server: LiveServer) -> None:
    made = ann.files.create(file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    database = server.server.service.database
    assert database is not None
    asyncio.run(database.write(lambda file: file.execute("UPDATE files SET expires_at = 1")))
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(made.id)
    assert ann.files.list().data == []
    with pytest.raises(openai.BadRequestError):
        ann.files.create(file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 10})
    left = stored(server)[0].with_name(".file-of-a-dead-process.part")
    for seconds_ago, stays in ((60, True), (7200, False)):
        left.touch()
        os.utime(left, (time.time() - seconds_ago,) * 2)
        asyncio.run(files_of(server.server.service).sweep())
        assert stored(server) == [left] * stays


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(), "purpose"),
        (form(("purpose", "fine-tune")), "purpose"),
        (form(("purpose", "batch"), ("purpose", "batch")), "purpose"),
        (form(("purpose", "batch"), ("expires_after[seconds]", "3600")), "expires_after"),
        (form(("purpose", "batch"))[:-8] + b"\r\n" + form(), "file"),
        (b"--xyz--\r\n", "file"),
        (b"", None),
        (form(("purpose", "batch"))[:-8], None),
        (form(("purpose", "x" * 1000)), None),
        (form(("purpose", "batch"), boundary="other"), None),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--", None),
        (b"--xyz\r\n" + b"x" * 20000, None),
        (form(*((f"more-{i}", "x") for i in range(40))), None),
        (form(("purpose", "batch")).replace(b"filename=", b"filename*=utf-8''a; filename*0="), None),
        (form(("purpose", "batch")).replace(b'filename="', b"filename*=a\0b''\""), None),
    ],
)
def test_a_form_that_cannot_be_used_leaves_nothing(
    server: LiveServer, ann: openai.OpenAI, body: bytes, param: str | None
) -> None:
    assert error_of(upload(server, body), 400)["param"] == param
    assert not stored(server)


def test_unknown_fields_are_told_and_other_bodies_refused(server: LiveServer, ann: openai.OpenAI) -> None:
    answer = upload(server, form(("purpose", "batch"), ("more", "x")))
    assert answer.headers["x-penstock-warning"] == "more: an unknown field, ignored"
    error_of(upload(server, b"{}", **{"Content-Type": "application/json"}), 415)
    error_of(upload(server, form(), **{"Content-Type": "multipart/form-data"}), 400)
    error_of(upload(server, form(), **{"Content-Type": "multipart/form-data; boundary=xyz; a*0*"}), 415)
    error_of(upload(server, form(), **{"Content-Type": "multipart/form-data; boundary*=utf-8''xyz; boundary*0=b"}), 400)
    error_of(upload(server, form(), **{"Content-Encoding": "gzip"}), 415)
    error_of(upload(server, form(), Origin="https://example.org"), 403)  # any page could send it


def test_without_a_folder_nothing_is_kept(live: LiveServer) -> None:
    for answer in (get(live, "/v1/files"), get(live, "/v1/files/x/content"), get(live, "/v1/batches")):
        assert "--data-dir" in error_of(answer, 404)["message"]


async def test_a_client_that_leaves_while_a_piece_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, is_begun, may_go_on = NewFile(tmp_path, 0), threading.Event(), threading.Event()
    write = new._write

    def write_slowly(content: bytes) -> None:
        is_begun.set()
        assert may_go_on.wait(60)
        write(content)

    monkeypatch.setattr(new, "_write", write_slowly)
    upload = asyncio.create_task(new.write(bytes(PIECE_BYTES)))
    assert await asyncio.to_thread(is_begun.wait, 60)
    upload.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not upload.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await upload
    new.discard()
    assert not os.listdir(tmp_path)


async def read_in_pieces(body: bytes, size: int) -> dict[str, bytes]:
    pieces = [body[i : i + size] for i in range(0, len(body), size)][::-1]

    async def next_piece() -> bytes:
        return pieces.pop() if pieces else b""

    found = {}
    async for part in FormReader("multipart/form-data; boundary=xyz", next_piece).parts():
        found[part.name] = b"".join([piece async for piece in part.pieces])
    return found


_HEAVY = ["a;", '";', 'a=";', ";a=b", '\\";', "a*0=b;", ";" * 8, 'filename="x";']


@pytest.mark.parametrize("unit", _HEAVY)
async def test_a_head_is_read_in_a_time_that_grows_with_it(unit: str) -> None:
    """Twenty heads of 8,000 bytes, in CPU time: Python's own parser takes seconds for them."""
    value = 'form-data; name="x"; a="' + unit * (8000 // len(unit))
    began = time.process_time()
    for _ in range(20):
        with suppress(MalformedBody):
            _parameter(value, "name")
    assert time.process_time() - began < 0.2


async def test_a_head_that_comes_in_one_piece_is_measured_too() -> None:
    body = form().replace(b"filename=", b"x=" + b";" * 200_000 + b"; filename=")
    with pytest.raises(MalformedBody, match="at most 8192 bytes"):
        await read_in_pieces(body, len(body))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ('form-data; name="a;b"', "a;b"),
        (r'form-data; name="say \"a\""', 'say "a"'),
        ("form-data; NAME = x ; y=z", "x"),
        ("form-data; name*=utf-8''t%C3%A4st", "täst"),
        ("form-data; name*=nowhere''a", "a"),
        ("form-data; other=x", None),
    ],
)
def test_parameters_of_a_head(value: str, found: str | None) -> None:
    assert _parameter(value, "name") == found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
async def test_the_borders_of_pieces_make_no_difference(size: int) -> None:
    body = b"before\r\n" + form(("purpose", "batch"), ("empty", ""), content=CONTENT[:500]) + b"after"
    assert await read_in_pieces(body, size) == {"purpose": b"batch", "empty": b"", "file": CONTENT[:500]}


async def test_a_form_that_ends_anywhere_is_refused() -> None:
    body = form(("purpose", "batch"))
    for end in range(len(body) - 4):
        with pytest.raises(MalformedBody):
            await read_in_pieces(body[:end], 5)


def test_the_description_has_the_form(live: LiveServer) -> None:
    described: dict[str, Any] = json.loads(get(live, "/openapi.json").content)
    assert list(described["paths"]["/v1/files"]["post"]["requestBody"]["content"]) == ["multipart/form-data"]
