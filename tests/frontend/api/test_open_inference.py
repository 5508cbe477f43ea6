"""The Open Inference Protocol's questions about a server and its model, and OpenAI's paths where KServe puts them."""

from pathlib import Path

import pytest

from penstock.ipc.version import VERSION
from tests.frontend.http_client import HELLO, error_of, events, get, post
from tests.frontend.live_server import LiveServer, live_server


def test_server_and_model(live: LiveServer) -> None:
    assert get(live, "/v2").json() == {"name": "penstock", "version": VERSION, "extensions": []}
    assert get(live, "/v2/health/live").json() == {"live": True}
    assert get(live, "/v2/health/ready").json() == {"ready": True}
    for name in ("test/model", "alias"):  # names may have slashes
        told = get(live, f"/v2/models/{name}").json()
        assert told == {"name": name, "versions": [], "platform": "penstock", "inputs": [], "outputs": []}
        assert get(live, f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
    error_of(get(live, "/v2/models/nothing"), 404)
    error_of(get(live, "/v2/models/nothing/ready"), 404)


def test_a_model_is_not_ready_before_its_engine_is(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, is_ready=False) as server:
        assert get(server, "/v2/health/live").status == 200
        error_of(get(server, "/v2/health/ready"), 503)
        error_of(get(server, "/v2/models/test/model/ready"), 503)
        error_of(get(server, "/v2/models/nothing/ready"), 404)
        assert get(server, "/v2/models/test/model").status == 200


@pytest.mark.parametrize("path", ["/openai/v1/chat/completions", "/openai/v1/completions", "/openai/v1/responses"])
def test_openai_paths_of_kserve(live: LiveServer, path: str) -> None:
    body = {"messages": HELLO, "prompt": "Hello", "input": "Hello"}
    wanted = {"chat": "messages", "comp": "prompt", "resp": "input"}[path.split("/")[3][:4]]
    assert post(live, path, {wanted: body[wanted]}).status == 200
    if wanted != "input":
        assert events(post(live, path, {wanted: body[wanted], "stream": True}))[-1] == "[DONE]"
    names = [card["id"] for card in get(live, "/openai/v1/models").json()["data"]]
    assert names == ["test/model", "alias"]
    assert get(live, "/openai/v1/models/test/model").json()["id"] == "test/model"
