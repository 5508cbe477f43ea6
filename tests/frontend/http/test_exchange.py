"""A request's life without aiohttp: the exchange mounted by a test, with plain calls."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from penstock.config import Config, FrontendOptions, IpcOptions, ModelOptions, SchedulerOptions
from penstock.config.api_keys import digest
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import load_text_model
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.exchange.exchange import Exchange, Request
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import Reply, StreamReply
from penstock.frontend.http.routes import ROUTES
from tests.frontend.checkpoint_folder import VOCAB_SIZE
from tests.frontend.fake_scheduler import FakeScheduler, Script
from tests.frontend.http_client import HELLO

ROUTE = {(route.method, route.path): route for route in ROUTES}
CHAT = ROUTE["POST", "/v1/chat/completions"]
KEYS = f"""
[[keys]]
id = "team"
sha256 = "{digest("pk-team").hex()}"
scopes = ["infer"]
max_concurrent = 1
"""
AUTHORIZED = {"authorization": ["Bearer pk-team"], "x-request-id": ["mine"]}


class Mount:
    """Service and exchange in the test's own event loop; the scheduler is a fake one behind a real socket."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        address = f"ipc://{folder}/frontend.sock"
        (folder / "keys.toml").write_text(KEYS)
        config = Config(
            model=ModelOptions(model=str(checkpoint)),
            frontend=FrontendOptions(api_keys_file=str(folder / "keys.toml"), max_request_timeout=5.0),
            ipc=IpcOptions(frontend_address=address),
            scheduler=SchedulerOptions(max_num_queued_seqs=1000),
        )
        self.scheduler = FakeScheduler(address, vocab_size=VOCAB_SIZE)
        metrics = Metrics(dict)
        self.context: zmq.Context[Any] = zmq.Context()
        link = EngineLink(EngineAddress(address, "mount", ""), over_sockets(self.context), pytest.fail)
        self.service = Service(config, load_text_model(config), RequestBook([link], config.scheduler), metrics)
        self.exchange = Exchange(self.service, self.service.access, metrics, config.frontend.max_request_timeout)

    def says(self, text: str, **options: Any) -> None:
        tokens = self.service.model.tokenizer.encode(text, add_special_tokens=False)
        self.scheduler.script = lambda request, sequence_idx: Script(tokens, **options)

    async def close(self) -> None:
        await self.service.close()
        self.scheduler.close()
        self.context.term()


@pytest.fixture
async def mount(checkpoint: Path, sockets: Path) -> AsyncIterator[Mount]:
    made = Mount(checkpoint, sockets)
    await made.service.engine.wait_ready(5.0)
    yield made
    await made.close()


def asked(headers: Mapping[str, Sequence[str]] = AUTHORIZED, **fields: Any) -> Request:
    async def read() -> bytes:
        return json.dumps({"messages": HELLO} | fields).encode()

    return Request(headers, read, remote="10.0.0.1")


async def status_and_error(mount: Mount, request: Request) -> tuple[int, str]:
    async with mount.exchange.answer(CHAT, request) as reply:
        assert isinstance(reply, Reply)
        assert reply.headers["x-request-id"]
        return reply.status, json.loads(reply.body)["error"]["code"]


def lines(logs: Sequence[Any]) -> list[tuple[int, str | None]]:
    """Status and error code of each request that was logged."""
    return [(entry["status"], entry.get("code")) for entry in logs if entry["event"] == "request"]


def counted(mount: Mount, status: int) -> float:
    sample = f'penstock_requests_total{{endpoint="/v1/chat/completions",status="{status}"}} '
    found = [line for line in mount.service.metrics.exposition().decode().splitlines() if line.startswith(sample)]
    return float(found[0].split()[-1]) if found else 0.0


async def test_a_whole_answer(mount: Mount) -> None:
    mount.says("Water runs")
    with structlog.testing.capture_logs() as logs:
        async with mount.exchange.answer(CHAT, asked()) as reply:
            assert isinstance(reply, Reply)
            assert reply.status == 200
            assert reply.headers == {"x-request-id": "mine"}
            assert json.loads(reply.body)["choices"][0]["message"]["content"] == "Water runs"
            assert counted(mount, 200) == 0, "it has not been sent yet"
    assert counted(mount, 200) == 1
    [entry] = [entry for entry in logs if entry["event"] == "request"]
    assert entry["key"] == "team"
    assert entry["finish_reasons"] == ["stop"]
    assert entry["ttft_ms"] > 0


async def test_a_stream(mount: Mount) -> None:
    mount.says("Water runs")
    with structlog.testing.capture_logs() as logs:
        async with mount.exchange.answer(CHAT, asked(stream=True)) as reply:
            assert isinstance(reply, StreamReply)
            sent = b"".join([chunk async for chunk in reply.chunks])
    assert sent.endswith(b"data: [DONE]\n\n")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Water runs"
    assert lines(logs) == [(200, None)]
    assert counted(mount, 200) == 1


async def test_a_stream_that_is_left_ends_the_work(mount: Mount) -> None:
    mount.says("Water runs", hangs=True)

    async def read_a_chunk_and_leave() -> None:
        async with mount.exchange.answer(CHAT, asked(stream=True)) as reply:
            assert isinstance(reply, StreamReply)
            assert await anext(reply.chunks)
            raise ConnectionResetError

    with structlog.testing.capture_logs() as logs:
        with pytest.raises(ConnectionResetError):
            await read_a_chunk_and_leave()
        await asyncio.sleep(0.1)
    assert len(mount.service.generations) == 0
    assert len(mount.scheduler.aborted) == 1
    assert lines(logs) == [(499, None)]
    assert counted(mount, 499) == 1


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (asked(n="two"), 400, "invalid_value"),
        (asked(model="other"), 404, "model_not_found"),
        (asked({}), 401, "invalid_api_key"),
        (asked({**AUTHORIZED, "x-request-timeout": ["soon"]}), 400, "invalid_value"),
    ],
)
async def test_an_error_is_an_answer(mount: Mount, request_: Request, status: int, code: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await status_and_error(mount, request_) == (status, code)
    assert lines(logs) == [(status, code)]
    assert counted(mount, status) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_only_a_stream_goes_on_without_its_client(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """The client leaves before it is known which it is."""
    streams, render = mount.service.streams, mount.service.prompts.render_and_encode
    has_begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def render_late(*args: Any) -> Any:
        has_begun.set()
        await may_go_on.wait()
        return await render(*args)

    async def ask() -> None:
        request = asked({**AUTHORIZED, "x-resumable": ["true"]}, stream=is_stream)
        async with Exchange(mount.service, mount.service.access, mount.service.metrics, 0, streams).answer(
            CHAT, request
        ):
            pytest.fail("nobody waits for an answer")

    monkeypatch.setattr(mount.service.prompts, "render_and_encode", render_late)
    mount.says("Water runs", hangs=not is_stream)
    with structlog.testing.capture_logs() as logs:
        client = asyncio.create_task(ask())
        await has_begun.wait()
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        may_go_on.set()
        async with asyncio.timeout(60):
            while not lines(logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert lines(logs) == [(200 if is_stream else 499, None)]
    assert len(mount.scheduler.added) == 1
    assert (len(mount.service.generations), len(streams)) == (0, int(is_stream))


async def test_a_deadline(mount: Mount) -> None:
    mount.says("Water runs", hangs=True)
    with structlog.testing.capture_logs() as logs:
        request = asked({**AUTHORIZED, "x-request-timeout": ["0.2"]})
        assert await status_and_error(mount, request) == (504, "deadline_exceeded")
    assert len(mount.service.generations) == 0
    assert lines(logs) == [(504, "deadline_exceeded")]


async def test_a_key_has_its_limits_until_its_requests_end(mount: Mount) -> None:
    mount.says("Water runs", hangs=True)
    async with mount.exchange.answer(CHAT, asked(stream=True)) as first:
        assert isinstance(first, StreamReply)
        assert await status_and_error(mount, asked()) == (429, "rate_limit_exceeded")
    mount.says("Water runs")
    async with mount.exchange.answer(CHAT, asked()) as reply:
        assert isinstance(reply, Reply)
        assert reply.status == 200
    assert (counted(mount, 200), counted(mount, 429)) == (2, 1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_has_ended_waits_no_more(mount: Mount, is_stream: bool) -> None:
    """Between two words of the scheduler the frontend counts alone."""
    queue = mount.service.engine.queue
    mount.scheduler.tell(mount.scheduler.stats(num_waiting=999))  # of 1000 that may wait
    async with asyncio.timeout(60):
        while not queue.stats:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    mount.says("Water runs")
    for _ in range(3):
        async with mount.exchange.answer(CHAT, asked(stream=is_stream)) as reply:
            if isinstance(reply, StreamReply):
                assert [chunk async for chunk in reply.chunks]
            else:
                assert reply.status == 200


async def test_a_defect_tells_the_client_nothing(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount.service.prompts, "render_and_encode", None)
    with structlog.testing.capture_logs() as logs:
        assert await status_and_error(mount, asked()) == (500, "internal_error")
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["request failed"]


def test_neither_handlers_nor_exchange_know_aiohttp() -> None:
    code = "import sys, penstock.frontend.http.routes; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
