"""The page's files over HTTP: who gets them, with which headers."""

import re
from pathlib import Path

import pytest

from penstock.config.options import FrontendOptions
from penstock.frontend.web import page
from tests.frontend.http_client import get, send
from tests.frontend.live_server import LiveServer


def test_a_browser_gets_the_page_and_others_a_list_of_routes(live: LiveServer) -> None:
    shown = send(live, "GET", "/", None, Accept="text/html,*/*;q=0.8")
    assert shown.status == 200
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert shown.headers["vary"] == "Accept"
    assert "POST /v1/chat/completions" in get(live, "/").json()["routes"]


def test_what_the_page_refers_to_is_there_and_nothing_else_can_be(live: LiveServer) -> None:
    shown = send(live, "GET", "/", None, Accept="text/html")
    referred = re.findall(r'(?:src|href)="(ui/[^"]+)"', shown.text)
    assert len(referred) >= 3
    for path in [*referred, *(f"ui/{name}" for name in page.files())]:
        found = get(live, f"/{path}")
        assert found.status == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for path in ("/ui/../page.py", "/ui/%2e%2e/page.py", "/ui//etc/passwd", "/ui/nothing.js", "/ui/parts"):
        assert get(live, path).status == 404


def test_a_file_that_is_known_is_not_sent_again(live: LiveServer) -> None:
    tag = get(live, "/ui/app.js").headers["etag"]
    again = send(live, "GET", "/ui/app.js", None, **{"If-None-Match": tag})
    assert (again.status, again.text) == (304, "")


def test_a_model_card_tells_what_its_settings_show(live: LiveServer) -> None:
    card = get(live, "/v1/models").json()["data"][0]
    assert card["input_modalities"] == ["text"]
    assert set(card["sampling_defaults"]) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


@pytest.mark.parametrize(
    ("host", "asked", "is_there"),
    [("127.0.0.1", "auto", True), ("0.0.0.0", "auto", False), ("0.0.0.0", "on", True), ("localhost", "off", False)],
)
def test_where_it_is_served(host: str, asked: str, is_there: bool) -> None:
    assert page.is_served(FrontendOptions(host=host, web_ui=asked)) is is_there  # type: ignore[arg-type]


def test_nothing_in_it_comes_from_elsewhere() -> None:
    for path in page.FOLDER.rglob("*.*"):
        text = Path(path).read_text()
        elsewhere = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "w3.org" not in url]
        assert not [url for url in elsewhere if "spec.whatwg.org" not in url], path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
