"""/openapi.json describes every route, and answers are as it says."""

import re
from typing import Any

import jsonschema
import pytest
from aiohttp import web

from penstock.frontend.http.app import make_app
from penstock.frontend.http.routes import ROUTES
from tests.frontend.http_client import HELLO, get, post
from tests.frontend.live_server import LiveServer


@pytest.fixture
def document(live: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = get(live, "/openapi.json").json()
    return found


def test_every_route_is_described(live: LiveServer, document: dict[str, Any]) -> None:
    app: web.Application = live.do(lambda: make_app(live.server.service))
    routed = {
        (route.method.lower(), re.sub(":.+}", "}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    routed -= {(route.method.lower(), alias) for route in ROUTES for alias in route.paths[1:]}
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} == routed


def test_it_is_made_of_the_structs(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["EmbeddingRequest"]["required"] == ["input"]
    assert schemas["InfillRequest"]["required"] == ["input_prefix", "input_suffix"]
    assert schemas["ChatRequest"]["properties"]["max_completion_tokens"]["anyOf"][0] == {"type": "integer"}
    assert "Not supported" in schemas["InfillRequest"]["properties"]["best_of"]["description"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "Hello", "logprobs": 1, "echo": True}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"max_tokens": 9, "messages": HELLO}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/responses", {"input": "Hello", "previous_response_id": "resp_x"}),
        ("/v1/responses/compact", {"input": "Hello"}),
        ("/v1/responses/compact", {"input": []}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ],
)
def test_answers_are_as_described(live: LiveServer, document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    response = post(live, path, body)
    described = document["paths"][path]["post"]["responses"][str(response.status)]["content"]["application/json"]
    jsonschema.validate(response.json(), described["schema"] | {"components": document["components"]})
