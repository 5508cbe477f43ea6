"""/v1/batches: checked first, each line answered once, resumed by whoever is there, with the rights of its key."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from penstock.config.api_keys import digest
from penstock.ipc.messages import AddRequest, ErrorCode
from penstock.parts.batches.frontend import Batches, course, lines, runner, sender
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import error_of, get, post
from tests.frontend.live_server import LiveServer, live_server

CHAT: Any = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(sender, "RETRY_SECONDS", (0.01, 0.05))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = str(tmp_path_factory.mktemp("data"))
    with live_server(checkpoint, tmp_path_factory.mktemp("s"), frontend={"data_dir": folder}) as live:
        tell_stats(live)
        yield live


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    shared.reset()
    yield shared
    client = client_of(shared)
    for batch in client.batches.list():
        if batch.status not in ENDS:
            client.batches.cancel(batch.id)


def tell_stats(live: LiveServer) -> None:
    """As an engine does, which tells the rows it has."""
    live.do(lambda: live.scheduler.tell(live.scheduler.stats(num_rows=8)))


def client_of(live: LiveServer, key: str = "none") -> openai.OpenAI:
    _clients.append(openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=60))
    return _clients[-1]


_clients: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def no_client_left() -> Iterator[None]:
    """Their sockets are closed with the test, not when somebody else's garbage is collected."""
    yield
    while _clients:
        _clients.pop().close()


def line(custom_id: Any, content: str = "Hello", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "test/model", "messages": [{"role": "user", "content": content}], "seed": 1} | fields
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def batch_of(client: openai.OpenAI, requests: list[Any], endpoint: Any = CHAT, **fields: Any) -> Batch:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in requests)
    given = client.files.create(file=("in.jsonl", text.encode(errors="surrogateescape")), purpose="batch")
    return client.batches.create(input_file_id=given.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    return when(client, batch, lambda now: now.status in ENDS)


def when(client: openai.OpenAI, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 60
    while not condition(now := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered(server: LiveServer) -> None:
    client = client_of(server)
    requests = [line(f"r{i}", f"Hello {i}") for i in range(20)] + [line("bad", temperature=-1)]
    made = batch_of(client, requests, metadata={"for": "a test"})
    assert (made.status, made.object, made.endpoint) == ("validating", "batch", CHAT)
    assert made.expires_at == made.created_at + 24 * 3600
    batch = ended(client, made)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
    assert batch.metadata == {"for": "a test"}
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    found = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [f"r{i}" for i in range(20)]
    for each in found:
        assert set(each) == {"id", "custom_id", "response", "error"}
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        answer = each["response"]["body"]
        assert answer["object"] == "chat.completion"
        assert answer["created"] == batch.created_at
        assert answer["id"] == f"chatcmpl-{each['response']['request_id']}"
    [failed] = results(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert batch.output_file_id is not None
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert all(request.is_background for request in server.scheduler.added)
    chat = post(server, CHAT, line("x")["body"])
    assert chat.status == 200
    assert not server.scheduler.added[-1].is_background
    assert 'penstock_batch_requests_total{outcome="completed"}' in get(server, "/metrics").text


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hello", "messages": None}, "text_completion"),
        ("/v1/responses", {"input": "Hello", "messages": None}, "response"),
    ],
)
def test_other_endpoints(server: LiveServer, endpoint: str, body: dict[str, Any], kind: str) -> None:
    client = client_of(server)
    found = []
    for _ in range(2):
        request = line("a", url=endpoint, **body)
        del request["body"]["messages"], request["body"]["seed"]  # all that is drawn follows from the line
        batch = ended(client, batch_of(client, [request], endpoint))
        assert batch.status == "completed"
        [answer] = results(client, batch.output_file_id)
        assert answer["response"]["body"]["object"] == kind
        found.append(json.dumps(answer).replace(batch.id.removeprefix("batch_"), "X"))
    assert server.scheduler.added[0].sampling.seed != server.scheduler.added[1].sampling.seed


def test_embeddings(server: LiveServer) -> None:
    client = client_of(server)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["Hello", "you"]}}
    batch = ended(client, batch_of(client, [request], "/v1/embeddings"))
    assert batch.status == "completed"
    [answer] = results(client, batch.output_file_id)
    assert [each["index"] for each in answer["response"]["body"]["data"]] == [0, 1]
    assert all(request.is_background for request in server.scheduler.added)


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("no json", "invalid_json_line", None),
        (json.dumps(line("b", model="\xff"), ensure_ascii=False).replace("\xff", "\udcff"), "invalid_json_line", None),
        (json.dumps(line("b", "\xff"), ensure_ascii=False).replace("\xff", "\udcff"), "invalid_json_line", None),
        ("[]", "invalid_type", None),
        ("[" * 100_000, "too_many_values", None),
        ('{"custom_id": "b"}', "missing_required_parameter", "method"),
        (line(7), "invalid_type", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b") | {"method": "GET"}, "invalid_method", "method"),
        (line("b", url="/v1/completions"), "invalid_url", "url"),
        (line("b") | {"body": []}, "invalid_type", "body"),
        (line("b", stream=True), "unsupported_parameter", "body.stream"),
        (line("b", model="other"), "model_not_found", "body.model"),
        (line("b", "x" * (3 << 20)), "line_too_long", None),
    ],
)
def test_one_wrong_line_fails_the_batch(server: LiveServer, wrong: Any, code: str, param: str | None) -> None:
    client = client_of(server)
    batch = ended(client, batch_of(client, [line("a"), "", wrong, line("z")]))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.line, error.param) == (code, 3, param), error
    assert not server.scheduler.added
    assert batch.output_file_id is None


def failure(batch: Batch) -> str:
    """The code of the only error of a failed batch."""
    assert (batch.status, batch.errors is not None) == ("failed", True), batch
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert error.message
    return str(error.code)


def remove_file(server: LiveServer, file_id: str | None) -> None:
    database = server.server.service.database
    assert database is not None
    (database.folder / "files" / str(file_id)).unlink()


def let_expire(server: LiveServer) -> None:
    """As if the windows of all batches were over."""
    database = server.server.service.database
    assert database is not None
    sql = "UPDATE batches SET facts = json_set(facts, '$.expires_at', 1)"
    asyncio.run_coroutine_threadsafe(database.write(lambda file: file.execute(sql)), server.loop).result(10)


def runner_of(live: LiveServer) -> runner.BatchRunner:
    part = live.server.service.parts.get(Batches)
    assert part is not None
    assert part.runner is not None
    return part.runner


def begin_again(server: LiveServer) -> None:
    """Begin all batches again, as after a restart."""
    running = runner_of(server)
    asyncio.run_coroutine_threadsafe(running._stop_all(), server.loop).result(10)


def test_a_file_that_is_gone_fails_the_batch(server: LiveServer) -> None:
    client = client_of(server)
    given = client.files.create(file=json.dumps(line("a")).encode(), purpose="batch")
    remove_file(server, given.id)
    made = client.batches.create(input_file_id=given.id, endpoint=CHAT, completion_window="24h")
    assert failure(ended(client, made)) == "input_file_missing"
    client.files.delete(given.id)


def test_a_file_that_goes_while_the_batch_runs_leaves_the_answers(server: LiveServer) -> None:
    client = client_of(server)
    slow = server.tokenizer.encode("slow", add_special_tokens=False)
    server.plays(lambda request, i: Script(slow, hangs=set(slow) <= set(prompt_ids(request))))
    batch = batch_of(client, [line("a"), line("b", "slow")])
    when(client, batch, lambda now: now.request_counts is not None and now.request_counts.completed == 1)
    remove_file(server, batch.input_file_id)
    begin_again(server)
    batch = ended(client, batch)
    assert failure(batch) == "input_file_missing"
    assert [each["custom_id"] for each in results(client, batch.output_file_id)] == ["a"]


def test_a_batch_that_cannot_be_checked_fails(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*given: Any) -> None:
        raise RuntimeError("a mistake")

    client = client_of(server)
    monkeypatch.setattr(course, "check_lines", check)
    assert failure(ended(client, batch_of(client, [line("a")]))) == "internal_error"


def test_a_batch_whose_time_is_over_before_it_was_checked_expires(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, may_go_on = client_of(server), threading.Event()

    def check(*given: Any) -> Any:
        assert may_go_on.wait(60)
        return lines.check_lines(*given)

    monkeypatch.setattr(course, "check_lines", check)
    batch = batch_of(client, [line("a")])
    let_expire(server)
    begin_again(server)
    may_go_on.set()
    batch = ended(client, batch)
    assert (batch.status, batch.in_progress_at is not None) == ("expired", True)
    [late] = results(client, batch.error_file_id)
    assert (late["custom_id"], late["error"]["code"]) == ("a", "batch_expired")
    assert not server.scheduler.added


def test_an_empty_file_and_too_many_lines(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(server)
    monkeypatch.setattr(lines.check_lines, "__defaults__", (2,))
    for requests, code in ((["", "  "], "empty_file"), ([line(f"{i}") for i in range(3)], "too_many_requests")):
        batch = ended(client, batch_of(client, requests))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == [code]


def test_what_no_batch_can_be_made_of(server: LiveServer) -> None:
    client = client_of(server)
    given = client.files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": given.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ):
        assert error_of(post(server, "/v1/batches", body | change), 400)["param"] == param
    error_of(get(server, "/v1/batches/batch_none"), 404)
    assert all(each.input_file_id != given.id for each in client.batches.list())


def test_endpoints_that_are_not_served(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is made for one; where it goes while a batch waits, the lines say so."""
    client, service = client_of(server), server.server.service
    monkeypatch.setattr(service, "routes", tuple(each for each in service.routes if "responses" not in each.path))
    with pytest.raises(openai.BadRequestError, match=r"endpoint must be .*embeddings', got '/v1/responses'"):
        batch_of(client, [line("a", url="/v1/responses")], "/v1/responses")
    monkeypatch.delitem(runner_of(server)._sender._routes, CHAT)
    batch = ended(client, batch_of(client, [line("a")]))
    [told] = results(client, batch.error_file_id)
    assert told["response"]["status_code"] == 404
    assert told["response"]["body"]["error"]["code"] == "not_found"


def test_cancelling_keeps_what_was_answered(server: LiveServer) -> None:
    client = client_of(server)
    text = server.tokenizer.encode("slow", add_special_tokens=False)

    def script(request: AddRequest, sequence_idx: int) -> Script:
        return Script(text, hangs=set(text) <= set(prompt_ids(request)))

    server.plays(script)
    batch = batch_of(client, [line("a"), line("b"), line("c", "slow")])
    when(client, batch, lambda now: now.request_counts is not None and now.request_counts.completed == 2)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at
    assert [each["custom_id"] for each in results(client, batch.output_file_id)] == ["a", "b"]
    server.wait_until(lambda: not server.scheduler.num_running)  # the third one computes no more
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_a_batch_expires(server: LiveServer) -> None:
    client = client_of(server)
    hangs = server.tokenizer.encode("slow", add_special_tokens=False)
    server.plays(lambda request, i: Script(hangs, hangs=set(hangs) <= set(prompt_ids(request))))
    server.do(lambda: server.server.service.generations)  # the loop is there
    batch = batch_of(client, [line("a"), line("b", "slow")])
    when(client, batch, lambda now: now.request_counts is not None and now.request_counts.completed == 1)
    let_expire(server)
    begin_again(server)
    batch = ended(client, batch)
    assert batch.status == "expired"
    assert batch.expired_at
    assert [each["custom_id"] for each in results(client, batch.output_file_id)] == ["a"]
    [late] = results(client, batch.error_file_id)
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("b", None, "batch_expired")


def test_what_comes_at_the_wrong_time_is_tried_again(server: LiveServer) -> None:
    client = client_of(server)
    tries: dict[str, int] = {}
    errors: list[tuple[str, ErrorCode]] = [("full", "queue_full"), ("broken", "internal")]

    def script(request: AddRequest, sequence_idx: int) -> Script:
        name = request.request_id.rpartition(":")[2]
        tries[name] = tries.get(name, 0) + 1
        number = int(name.rpartition("-")[2])
        text, code = errors[number % 2]
        if tries[name] < (6 if code == "queue_full" else 2) or number == 5:
            return Script(error=text, error_code=code)
        return Script([5, 6])

    server.plays(script)
    batch = ended(client, batch_of(client, [line(f"{i}") for i in range(5)]))
    assert batch.status == "completed"
    assert [each["custom_id"] for each in results(client, batch.output_file_id)] == ["0", "1", "2", "3"]
    [failed] = results(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("4", 500)
    assert sorted(tries.values()) == [2, 2, 3, 6, 6]


def test_another_server_goes_on_and_the_bytes_are_the_same(
    checkpoint: Path, sockets: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEASE_SECONDS", 1.0)
    requests = [line(f"r{i}", f"Hello {i}", seed=i if i % 2 else None) for i in range(12)]
    options = {"data_dir": str(folder), "shutdown_timeout": 0.1}
    with live_server(checkpoint, sockets, frontend=options) as first:
        tell_stats(first)
        client = client_of(first)
        played = itertools.count(1)
        first.plays(lambda request, i: Script([5, 6], hangs=next(played) > 6))
        made = batch_of(client, requests)
        when(client, made, lambda now: now.request_counts is not None and now.request_counts.completed >= 4)
    (sockets / "second").mkdir()
    with live_server(checkpoint, sockets / "second", frontend=options) as second:
        tell_stats(second)
        second.plays(lambda request, i: Script([5, 6]))
        client = client_of(second)
        batch = ended(client, made)
        assert batch.status == "completed"
        assert len(second.scheduler.added) < len(requests)  # not those that had their answer
        given = client.files.content(batch.input_file_id).content
        assert batch.output_file_id is not None
        disturbed = client.files.content(batch.output_file_id).content
        again = ended(client, batch_of(client, [each.decode() for each in given.splitlines()]))
        assert again.output_file_id is not None
        whole = client.files.content(again.output_file_id).content
    custom_ids = [json.loads(each)["custom_id"] for each in disturbed.splitlines()]
    assert custom_ids == [f"r{i}" for i in range(12)]
    assert same(disturbed, batch) == same(whole, again)


def same(content: bytes, batch: Batch) -> bytes:
    """Results without what names their batch: its id, and when it was made."""
    content = content.replace(batch.id.removeprefix("batch_").encode(), b"ID")
    return content.replace(b'"created":%d' % batch.created_at, b'"created":0')


def test_two_servers_share_the_work_without_doing_it_twice(checkpoint: Path, sockets: Path, folder: Path) -> None:
    for name in ("one", "two"):
        (sockets / name).mkdir()
    options = {"data_dir": str(folder)}
    with (
        live_server(checkpoint, sockets / "one", frontend=options) as one,
        live_server(checkpoint, sockets / "two", frontend=options) as two,
    ):
        for each in (one, two):
            tell_stats(each)
        made = [batch_of(client_of(each), [line(f"{i}") for i in range(10)]) for each in (one, two)]
        for batch in made:
            assert ended(client_of(two), batch).status == "completed"
        assert len(one.scheduler.added) + len(two.scheduler.added) == 20


def test_a_batch_has_the_rights_of_its_key_and_leaves_it_room(
    checkpoint: Path, sockets: Path, folder: Path, tmp_path: Path
) -> None:
    def keys(*names: str) -> str:
        more = "max_concurrent = 4\nnamespace = 'n'\nweight = 2.0\n"
        return "".join(f'[[keys]]\nid = "{n}"\nsha256 = "{digest(n).hex()}"\n{more}' for n in names)

    file = tmp_path / "keys.toml"
    file.write_text(keys("ann", "bob"))
    options = {"data_dir": str(folder), "api_keys_file": str(file)}
    with live_server(checkpoint, sockets, frontend=options) as live:
        tell_stats(live)
        ann, bob = client_of(live, "ann"), client_of(live, "bob")
        live.plays(lambda request, i: Script([5], hangs=request.is_background))
        batch = batch_of(ann, [line(f"{i}") for i in range(10)])
        live.wait_until(lambda: live.scheduler.num_running == 2)  # half of what the key may have
        answer = ann.chat.completions.create(model="test/model", messages=line("x")["body"]["messages"])
        assert answer.choices
        request = live.scheduler.added[0]
        assert (request.tenant, request.weight, request.cache_salt) == ("ann", 2.0, "n\n")
        assert bob.batches.list().data == []
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.BadRequestError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        file.write_text(keys("bob"))
        live.do(live.server.reload)
        live.says("Hello")
        running = runner_of(live)
        asyncio.run_coroutine_threadsafe(running._stop_all(), live.loop).result(10)
        database = live.server.service.database
        assert database is not None
        done: dict[str, Any] = {"status": ""}
        deadline = time.monotonic() + 60
        while done["status"] != "completed":
            assert time.monotonic() < deadline, done
            time.sleep(0.02)
            done = json.loads(
                asyncio.run(database.read(lambda f: f.execute("SELECT facts FROM batches").fetchone()[0]))
            )
        assert done["output_file_id"] is None
        assert done["error_file_id"]


def test_batches_are_listed_in_pages(server: LiveServer) -> None:
    client = client_of(server)
    made = [batch_of(client, [line("a")]).id for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)][:3] == made[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more
    for wrong in ({"limit": 101}, {"after": "batch_none"}):
        with pytest.raises(openai.BadRequestError):
            client.batches.list(**wrong)
