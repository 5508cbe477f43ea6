"""One API over two models: what a request names answers it."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-llm[ray]'")

from penstock.deploy.ray.many_models import ManyModels
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.http.test_asgi import Client
from tests.frontend.live_server import LiveServer, live_server

BODY = {"prompt": "Hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ManyModels, LiveServer, LiveServer]]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    sockets = [tempfile.TemporaryDirectory(prefix="pst-") for _ in range(2)]
    with (
        sockets[0] as a,
        sockets[1] as b,
        live_server(folder, Path(a)) as first,
        live_server(folder, Path(b)) as second,
    ):
        other = second.server.service
        object.__setattr__(other.model, "names", ("org/other",))
        made = first.do(lambda: ManyModels([first.server.service, other]))
        yield made, first, second


def ask(
    both: tuple[ManyModels, LiveServer, LiveServer], method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """By the loop of the model that answers: each service lives in its own here."""
    many, first, second = both
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    client = Client(method, path, content, **headers, **({} if body is None else {"Content-Type": "application/json"}))
    loop = second.loop if b"org/other" in (content or b"") or "org/other" in path else first.loop

    async def run() -> None:
        await many(client.scope, client.receive, client.send)

    asyncio.run_coroutine_threadsafe(run(), loop).result(10)
    answer = client.answer()
    kind = answer.headers.get("content-type", "")
    return answer.status, json.loads(answer.content) if kind == "application/json" else answer.text


def test_the_body_names_the_model(both: tuple[ManyModels, LiveServer, LiveServer]) -> None:
    _, first, second = both
    for name, server, other in (("org/other", second, first), ("test/model", first, second), (None, first, second)):
        first.reset()
        second.reset()
        status, answer = ask(both, "POST", "/v1/completions", BODY | ({} if name is None else {"model": name}))
        assert (status, answer["model"]) == (200, name or "test/model")
        assert (len(server.scheduler.added), len(other.scheduler.added)) == (1, 0)
    status, answer = ask(both, "POST", "/v1/completions", BODY | {"model": "nothing"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body", [b"{", b"[" * 100_000, b'{"model": 5}', b"\xff", b'{"prompt": "' + b"x" * 3_000_000 + b'"}']
)
def test_bodies_that_name_none_get_the_first_ones_answer(
    both: tuple[ManyModels, LiveServer, LiveServer], body: bytes
) -> None:
    status, answer = ask(both, "POST", "/v1/completions", body)
    assert 400 <= status < 500
    assert answer["error"]["message"]


def test_lists_are_of_all(both: tuple[ManyModels, LiveServer, LiveServer]) -> None:
    _, models = ask(both, "GET", "/v1/models")
    assert [card["id"] for card in models["data"]] == ["test/model", "alias", "org/other"]
    assert ask(both, "GET", "/v1/models/org/other")[1]["id"] == "org/other"
    _, page = ask(both, "GET", "/v1/models", anthropic_version="2023-06-01")
    assert [info["id"] for info in page["data"]] == ["test/model", "alias", "org/other"]
    assert ask(both, "GET", "/v2/models/org/other/ready")[1] == {"name": "org/other", "ready": True}
    assert ask(both, "GET", "/v1/models/nothing")[0] == 404
    _, told = ask(both, "GET", "/metrics")
    assert 'penstock_num_requests_in_frontend{model_name="test/model"}' in told
    assert 'penstock_num_requests_in_frontend{model_name="org/other"}' in told
    assert told.count("# TYPE penstock_num_requests_in_frontend gauge") == 1


def test_ready_means_all_of_them(both: tuple[ManyModels, LiveServer, LiveServer]) -> None:
    second = both[2]
    assert ask(both, "GET", "/ready")[0] == 200
    second.do(lambda: second.scheduler.set_ready(False))
    second.wait_until(lambda: second.server.service.engine.facts is None)
    assert ask(both, "GET", "/ready")[0] == 503
    second.do(lambda: second.scheduler.set_ready(True))
    second.wait_until(lambda: second.server.service.engine.facts is not None)
    assert ask(both, "GET", "/ready")[0] == 200
