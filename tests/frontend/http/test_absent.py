"""Routes that other servers have, and this one does not."""

import pytest

from tests.frontend.http_client import error_of, get, post, send
from tests.frontend.live_server import LiveServer

ABSENT = [
    ("POST", "/v1/moderations", "response_format"),
    ("GET", "/v1/chat/completions", "/v1/responses"),
    ("GET", "/v1/chat/completions?limit=5", "/v1/responses"),
    ("GET", "/v1/chat/completions/chatcmpl-1", "/v1/responses"),
    ("POST", "/v1/chat/completions/chatcmpl-1", "/v1/responses"),
    ("DELETE", "/v1/chat/completions/chatcmpl-1", "/v1/responses"),
    ("GET", "/v1/chat/completions/chatcmpl-1/messages", "/v1/responses"),
    ("POST", "/v1/audio/transcriptions", "not served"),
    ("POST", "/v1/images/generations", "not served"),
    ("POST", "/v1/threads", "/v1/responses"),
    ("POST", "/embed_all", "POST /embed"),
    ("POST", "/embed_sparse", "POST /embed"),
]


@pytest.mark.parametrize(("method", "path", "instead"), ABSENT)
def test_an_absent_route_says_what_to_use(live: LiveServer, method: str, path: str, instead: str) -> None:
    error = error_of(send(live, method, path, b"{}" if method == "POST" else b""), 404)
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    assert instead in error["message"]


def test_other_paths_are_as_before(live: LiveServer) -> None:
    assert error_of(get(live, "/v1/moderationsx"), 404)["message"] == "there is nothing at '/v1/moderationsx'"
    assert error_of(send(live, "DELETE", "/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert post(live, "/v1/chat/completions", {"messages": []}).status == 400
