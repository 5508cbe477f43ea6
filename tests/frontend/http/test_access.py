"""API keys: every route wants one, but for the two that probes ask; each key does what its scopes say."""

import http.client
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.config.api_keys import SCOPES, ApiKey, digest, load_api_keys
from penstock.frontend.http.routes import ROUTES
from tests.frontend.http_client import HELLO, post, send
from tests.frontend.live_server import LiveServer, live_server

KEYS = {"infer": "pk-one", "metrics": "pk-two", "admin": "pk-three"}


def entry(name: str, key: str, scope: str) -> str:
    return f'[[keys]]\nid = "{name}"\nsha256 = "{digest(key).hex()}"\nscopes = ["{scope}"]\n'


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(entry(scope, key, scope) for scope, key in KEYS.items()))
    options = {"api_keys_file": str(path)}
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as folder,
        live_server(checkpoint, Path(folder), frontend=options) as live,
    ):
        yield live


def routes(live: LiveServer) -> list[tuple[str, str]]:
    """(method, path) of everything that is routed, from the router itself."""
    router = live.server._runners[0].app.router
    found = [(route.method, route.resource.canonical) for route in router.routes() if route.resource is not None]
    return [(method, re.sub(r"\{id.*\}", "x", path)) for method, path in found]


def test_every_route_wants_a_key(guarded: LiveServer) -> None:
    found = routes(guarded)
    assert len(found) > 15
    is_open = {
        (method, path.replace("{id}", "x"))
        for route in ROUTES
        if not route.scope
        for path in route.paths
        for method in ({route.method, "HEAD"} if route.method == "GET" else {route.method})
    }
    for method, path in [*found, ("GET", "/nothing"), ("POST", "/v1/models"), ("GET", "//health")]:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEYS["infer"]},
            {"Authorization": f"Basic {KEYS['infer']}"},
            {"Authorization": "Bearer " + "k" * 4000},
            {"Authorization": "Bearer \xfc\xdf"},
            {"X-Api-Key": "wrong"},
            {"Authorization": "Bearer wrong", "X-Api-Key": KEYS["infer"]},
            {"Host": "localhost/health?"},
        ):
            answer = send(
                guarded, method, f"{path}?key={KEYS['infer']}", b"{}" if method == "POST" else None, **headers
            )
            if "Host" in headers:  # that is none, wherever it is sent
                assert answer.status == 400
            elif (method, path) in is_open:
                assert answer.status == (404 if path.endswith("/x") else 200)
                continue
            assert answer.status in (400, 401) if "Host" in headers else answer.status == 401, (method, path, headers)
            if answer.status == 401 and method != "HEAD":
                error = answer.json()["error"]
                if isinstance(error, dict):  # Ollama's API has a sentence alone
                    assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEYS["infer"] not in answer.text


def test_a_key_by_its_other_name(guarded: LiveServer) -> None:
    for headers in ({"X-Api-Key": KEYS["infer"]}, {"Authorization": f"Bearer {KEYS['infer']}", "X-Api-Key": "wrong"}):
        assert send(guarded, "GET", "/v1/models", None, **headers).status == 200
    assert send(guarded, "GET", "/metrics", None, **{"X-Api-Key": KEYS["infer"]}).status == 403


def test_paths_that_look_like_open_ones_are_not(guarded: LiveServer) -> None:
    for path in ("/health//", "/HEALTH", "/v1/../health", "/health/../v1/models", "/%2e%2e/v1/models", "/ready;x"):
        assert send(guarded, "GET", path).status == 401, path


def test_two_keys_are_none(guarded: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=60)
    connection.putrequest("GET", "/v1/models")
    for key in KEYS.values():
        connection.putheader("Authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status in (400, 401)
    connection.close()


def test_scopes(guarded: LiveServer) -> None:
    allowed = {
        scope: {
            path: send(guarded, method, path, Authorization=f"bearer {key}").status
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/reset_prefix_cache"))
        }
        for scope, key in KEYS.items()
    }
    assert allowed["infer"] == {"/v1/models": 200, "/metrics": 403, "/reset_prefix_cache": 403}
    assert allowed["metrics"] == {"/v1/models": 403, "/metrics": 200, "/reset_prefix_cache": 403}
    assert allowed["admin"]["/v1/models"] == allowed["admin"]["/metrics"] == 403
    assert allowed["admin"]["/reset_prefix_cache"] != 403
    refused = send(guarded, "GET", "/metrics", Authorization=f"Bearer {KEYS['infer']}").json()["error"]
    assert (refused["code"], "'metrics'" in refused["message"]) == ("permission_denied", True)


def test_a_request_with_a_key_is_served(guarded: LiveServer) -> None:
    guarded.says("Good day")
    body = {"model": "test/model", "messages": HELLO}
    answer = post(guarded, "/v1/chat/completions", body, Authorization=f"Bearer {KEYS['infer']}")
    assert answer.json()["choices"][0]["message"]["content"] == "Good day"


def test_made_keys_are_read(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "keys", 'an "odd" name', "--scopes", "infer", "admin"],
        capture_output=True,
        text=True,
        check=True,
    )
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    path = tmp_path / "keys.toml"
    path.write_text(made.stdout)
    [found] = load_api_keys(str(path), {})
    assert found == ApiKey('an "odd" name', digest(key), frozenset(("infer", "admin")))
    assert tomllib.loads(made.stdout)["keys"][0]["id"] == 'an "odd" name'
    both = load_api_keys(str(path), {"PENSTOCK_API_KEY": "another"})
    assert both[1] == ApiKey("environment", digest("another"), frozenset(SCOPES))
    assert load_api_keys("", {"PENSTOCK_API_KEY": ""}) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys = 3", "[[keys]] tables"),
        ("[[keys", "not valid TOML"),
        ("", "[[keys]] tables"),
        ('[[keys]]\nid = "a"\nsha256 = "12"', "64 hexadecimal"),
        (entry("a", "k", "root"), "scopes must be some of"),
        (entry("a", "k", "infer") + entry("a", "l", "infer"), "two keys with the same id"),
        (entry("a", "k", "infer") + "limit = 3", "only id, sha256"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_api_keys(str(path), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_api_keys(str(tmp_path / "none.toml"), {})
