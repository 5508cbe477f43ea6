"""With an administrators' listener, theirs is answered there alone; probes are answered on both."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.config import Config, ConfigError, FrontendOptions, validate
from penstock.config.api_keys import digest
from penstock.config.listening import check_listening
from penstock.frontend.http.routes import ROUTES
from tests.frontend.http_client import complete, error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server

ANY_PORT = "1"  # the test's server lets the system choose
OPEN = {route.path for route in ROUTES if not route.scope}


class Admin(NamedTuple):
    port: int


@pytest.fixture
def live(checkpoint: Path, sockets: Path) -> Iterator[LiveServer]:
    with live_server(checkpoint, sockets, frontend={"admin_port": ANY_PORT}) as server:
        yield server


def paths(live: LiveServer, listener: int) -> set[str]:
    router = live.server._runners[listener].app.router
    return {route.resource.canonical for route in router.routes() if route.resource is not None}


def with_aliases(canonical: Iterable[str]) -> set[str]:
    """These paths and their other names, as the router writes them."""
    aliases = {route.path: route.paths[1:] for route in ROUTES}
    return {name for path in canonical for name in (path, *aliases.get(path, ()))}


def test_each_answers_its_own(live: LiveServer) -> None:
    admin = Admin(live.admin_port)
    assert complete(live).status == 200
    assert b"penstock_requests_total" in get(admin, "/metrics").content
    assert send(admin, "POST", "/reset_prefix_cache").status == 200
    for path in OPEN:
        path = path.replace("{id}", "app.js")
        assert get(live, path).status == get(admin, path).status == 200
    assert error_of(get(live, "/metrics"), 404)["code"] == "not_found"
    assert send(live, "POST", "/reset_prefix_cache").status == 404
    assert post(admin, "/v1/completions", {"prompt": "Hello"}).status == 404
    assert get(admin, "/v1/models").status == 404


def test_every_route_is_somewhere(live: LiveServer, checkpoint: Path, tmp_path: Path) -> None:
    of_engines = {"/engines", *(f"/engines/{{id}}/{what}" for what in ("drain", "undrain", "restart", "role"))}
    of_debugging = {
        "/metrics",
        "/debug/requests",
        "/debug/expert_load",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
    of_debugging |= {
        f"/debug/{what}" for what in ("steps", "kv", "prefix_tree", "requests/{id}", "recordings", "simulate")
    }
    assert paths(live, 1) == with_aliases(of_debugging | of_engines | OPEN)
    with live_server(checkpoint, tmp_path) as alone:
        assert alone.admin_port == 0
        assert paths(live, 0) | paths(live, 1) == paths(alone, 0)
        assert get(alone, "/metrics").status == 200


def test_the_description_leaves_out_what_is_not_there(live: LiveServer) -> None:
    assert with_aliases(get(live, "/openapi.json").json()["paths"]) == paths(live, 0)


def test_it_wants_keys_all_the_same(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nid = "monitor"\nsha256 = "{digest("pk-m").hex()}"\nscopes = ["metrics"]\n')
    with live_server(checkpoint, sockets, frontend={"admin_port": ANY_PORT, "api_keys_file": str(keys)}) as server:
        admin = Admin(server.admin_port)
        assert get(admin, "/metrics").status == get(admin, "/nothing").status == 401
        assert get(admin, "/health").status == 200
        assert get(admin, "/metrics", Authorization="Bearer pk-m").status == 200
        assert send(admin, "POST", "/reset_prefix_cache", Authorization="Bearer pk-m").status == 403


def test_it_is_bound_with_the_same_care() -> None:
    options = FrontendOptions(admin_port="0.0.0.0:9000")
    with pytest.raises(ConfigError, match=r"--admin-port 0\.0\.0\.0:9000 .* --insecure-bind"):
        check_listening(options, {})
    check_listening(options, {"PENSTOCK_API_KEY": "pk"})
    check_listening(FrontendOptions(admin_port="9000"), {})
    with pytest.raises(ConfigError, match="another port than --port"):
        validate(Config(frontend=FrontendOptions(port=9000, admin_port="9000")))


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("", None),
        ("0", None),
        ("9000", ("127.0.0.1", 9000)),
        ("10.0.0.7:9000", ("10.0.0.7", 9000)),
        ("localhost:9000", ("localhost", 9000)),
        ("[::1]:9000", ("::1", 9000)),
    ],
)
def test_it_may_have_an_address_of_its_own(given: str, address: tuple[str, int] | None) -> None:
    assert validate(Config(frontend=FrontendOptions(admin_port=given))).frontend.admin_address == address


@pytest.mark.parametrize("given", ["x", "9000:", ":9000", "-1", "65536", "::1:9000", "host:name", "9000 "])
def test_what_is_no_port_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--admin-port .* must be PORT or HOST:PORT"):
        validate(Config(frontend=FrontendOptions(admin_port=given)))
