"""One server and one browser for all tests of the page."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from tests.e2e.servers import Server, serving
from tests.web.browsers import launched, paged

MODEL = Path(__file__).parents[2] / "demo" / "model"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Server]:
    """`penstock serve` with the demo model."""
    async with serving(MODEL) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Any]:
    async with launched() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Any, served: Server) -> AsyncIterator[Any]:
    """The page, in a browser that has nothing stored."""
    async with paged(browser, served.url, viewport={"width": 1280, "height": 800}) as found:
        yield found
