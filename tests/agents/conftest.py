"""Scripted servers, one for each family, started when first asked for."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents.families import FAMILIES
from tests.agents.scripted_server import scripted_server

if not os.environ.get("AGENT_TESTS"):  # they have an environment of their own: `make test-agents`
    collect_ignore = ["frameworks"]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up on the network

ServerOf = Callable[[str], str]


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerOf]:
    """The base URL of a family's server."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:

        def find(name: str) -> str:
            if name not in urls:
                folder: Path = tmp_path_factory.mktemp(name)
                urls[name] = stack.enter_context(scripted_server(folder, FAMILIES[name]))
            return urls[name]

        yield find


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Frameworks meet the first family in all ways, the others in the hardest one; AGENT_TESTS=all is for all."""
    if os.environ.get("AGENT_TESTS") == "all":
        return

    def is_wanted(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        family = None if callspec is None else callspec.params.get("url")
        if "frameworks" not in item.nodeid or family in (None, "qwen"):
            return True
        return "strict" in item.nodeid and "streamed" in item.nodeid

    left_out = [item for item in items if not is_wanted(item)]
    items[:] = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(params=["qwen", "llama", "mistral"])
def url(server_of: ServerOf, request: pytest.FixtureRequest) -> str:
    """Each family's server in turn."""
    return server_of(request.param)
