"""Pages of other origins: by default no answer says a word, and then only to those that are named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.api_keys import digest
from tests.frontend.http_client import Response, complete, events, get, post, send
from tests.frontend.live_server import LiveServer, live_server

PAGE = "https://chat.example.org"
OTHERS = ("https://evil.example.org", "https://chat.example.org:8443", "http://chat.example.org", "null", "*", "")
KEY = {"Authorization": "Bearer pk-one"}


@pytest.fixture
def shared(checkpoint: Path, sockets: Path, tmp_path: Path) -> Iterator[LiveServer]:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nid = "a"\nsha256 = "{digest("pk-one").hex()}"\n')
    options = {"cors_origins": (PAGE, "http://localhost:3000"), "api_keys_file": str(keys), "admin_port": "1"}
    with live_server(checkpoint, sockets, frontend=options) as live:
        yield live


def preflight(live: LiveServer, origin: str, path: str = "/v1/chat/completions") -> Response:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return send(live, "OPTIONS", path, None, Origin=origin, **wanted)


def told(response: Response) -> set[str]:
    return {name for name in response.headers if name.startswith("access-control-")}


def test_by_default_no_answer_says_a_word(live: LiveServer) -> None:
    for response in (
        get(live, "/v1/models", Origin=PAGE),
        get(live, "/nothing", Origin=PAGE),
        post(live, "/v1/completions", {"prompt": "Hello", "stream": True}, Origin=PAGE),
        preflight(live, PAGE),
    ):
        assert told(response) == set()
        assert "vary" not in response.headers
    assert preflight(live, PAGE).status == 405


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses/x", "/nothing"])
def test_a_preflight_needs_no_key(shared: LiveServer, path: str) -> None:
    answer = preflight(shared, PAGE, path)
    assert (answer.status, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert {"POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert int(answer.headers["access-control-max-age"]) > 0
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


def test_what_is_no_preflight_is_no_way_around_keys(shared: LiveServer) -> None:
    assert send(shared, "OPTIONS", "/v1/models", Origin=PAGE).status == 401
    assert get(shared, "/v1/models", Origin=PAGE, **{"Access-Control-Request-Method": "GET"}).status == 401


@pytest.mark.parametrize("origin", OTHERS)
def test_other_pages_are_told_nothing(shared: LiveServer, origin: str) -> None:
    for response in (preflight(shared, origin), get(shared, "/v1/models", Origin=origin, **KEY)):
        assert told(response) == set()
        assert response.headers["vary"] == "Origin"
    assert preflight(shared, origin).status == 401


def test_every_answer_is_for_the_page_to_read(shared: LiveServer) -> None:
    whole = get(shared, "/v1/models", Origin=PAGE, **KEY)
    streamed = post(shared, "/v1/completions", {"prompt": "Hello", "stream": True}, Origin=PAGE, **KEY)
    assert events(streamed)[-1] == "[DONE]"
    refused = get(shared, "/v1/models", Origin=PAGE)
    nowhere = get(shared, "/nothing", Origin=PAGE, **KEY)
    for response, status in ((whole, 200), (streamed, 200), (refused, 401), (nowhere, 404)):
        assert response.status == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert told(get(shared, "/v1/models", **KEY)) == set()


def test_the_port_for_administrators_is_for_no_page(shared: LiveServer) -> None:
    class Admin:
        port = shared.admin_port

    assert (
        told(send(Admin(), "OPTIONS", "/metrics", None, Origin=PAGE, **{"Access-Control-Request-Method": "GET"}))
        == set()
    )
    assert told(get(Admin(), "/health", Origin=PAGE)) == set()


def test_header_names_are_given_back_only_if_they_are_names(shared: LiveServer) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a\tb: c"}
    answer = send(shared, "OPTIONS", "/v1/models", None, Origin=PAGE, **wanted)
    assert "access-control-allow-headers" not in answer.headers


def test_requests_without_a_page_are_served_as_before(shared: LiveServer) -> None:
    assert complete(shared).status == 401
    assert post(shared, "/v1/completions", {"prompt": "Hello"}, **KEY).status == 200
