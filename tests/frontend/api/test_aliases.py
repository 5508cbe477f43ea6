"""Other ways of asking for the same: paths, keys' headers, and values that mean none."""

import pytest

from penstock.frontend.http.routes import ROUTES
from tests.frontend.http_client import HELLO, get, post
from tests.frontend.live_server import LiveServer


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ping", "/ping/", "/v1/models/", "/models", "/metrics/"])
def test_gets(live: LiveServer, path: str) -> None:
    assert get(live, path).status == 200


@pytest.mark.parametrize("before", ["/v1", "", "/openai/v1"])
@pytest.mark.parametrize("after", ["", "/"])
def test_an_api_below_other_paths(live: LiveServer, before: str, after: str) -> None:
    for limit in ({"max_tokens": -1}, {"max_completion_tokens": -1}):
        answer = post(live, f"{before}/chat/completions{after}", {"messages": HELLO, **limit})
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert post(live, f"{before}/completions{after}", {"prompt": "Hello", "max_tokens": -1}).status == 200
    assert post(live, f"{before}/responses{after}", {"input": "Hello", "max_output_tokens": -1}).status == 200
    assert get(live, f"{before}/models/test/model").json()["id"] == "test/model"


def test_no_two_routes_have_a_path() -> None:
    named = [(route.method, path) for route in ROUTES for path in route.paths]
    assert len(set(named)) == len(named)
