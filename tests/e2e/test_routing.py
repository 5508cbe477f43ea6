"""Two real engines behind one frontend: a conversation stays where it was, as long as its prefix is there."""

import asyncio
import signal
from typing import Any

import aiohttp

from tests.e2e.servers import Server, serving
from tests.request_path import ROOT

SYSTEM = "You answer in one short sentence. " * 20


class Talk:
    """A conversation, and what was said of each answer."""

    def __init__(self, http: aiohttp.ClientSession, server: Server) -> None:
        self._http = http
        self._url = f"{server.url}/v1/chat/completions"
        self._messages = [{"role": "system", "content": SYSTEM}]
        self.engines: list[str] = []
        self.num_cached: list[int] = []

    async def say(self, text: str) -> None:
        """One turn."""
        self._messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"messages": self._messages, "max_tokens": 24, "temperature": 0}
        async with self._http.post(self._url, json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        self.engines.append(response.headers["x-penstock-engine"])
        self.num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self._messages.append(answer["choices"][0]["message"])
        await asyncio.sleep(0.2)  # until it is told what is cached


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    async with (
        serving(ROOT / "demo/model", "--data-parallel-size", "2", "--heartbeat-timeout", "2") as server,
        aiohttp.ClientSession() as http,
    ):
        async with asyncio.timeout(60):
            while len(await server.labelled(http, "penstock_engine_ready")) < 2:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.1)
        talk = Talk(http, server)
        for text in ("What is 2 + 3?", "And 3 + 4?", "Name a fruit."):
            await talk.say(text)
        home = talk.engines[0]
        assert talk.engines == [home] * 3
        assert talk.num_cached[0] == 0 < talk.num_cached[1] < talk.num_cached[2]

        async with http.post(f"{server.url}/reset_prefix_cache") as response:
            assert response.status == 200
        await asyncio.sleep(0.2)
        await talk.say("Name another one.")
        assert talk.num_cached[-1] == 0
        told = await server.labelled(http, "penstock_router_requests_total")
        assert sum(value for labels, value in told if labels["reason"] == "new") == 2, "that it was emptied is known"
        assert sum(value for labels, value in told if labels["reason"] == "prefix") == 2
        expected = await server.labelled(http, "penstock_router_expected_tokens_total")
        found = await server.labelled(http, "penstock_router_found_tokens_total")
        assert sum(value for _, value in expected) == sum(value for _, value in found) == sum(talk.num_cached)

        home = talk.engines[-1]
        server.children()[f"penstock-scheduler-{home}"].send_signal(signal.SIGKILL)
        await talk.say("And a third one.")
        assert talk.num_cached[-1] == 0, "wherever it was computed"
        await talk.say("Thank you.")
        assert talk.num_cached[-1] > 0, "and it went there again"
        lines = [each for each in server.log if each["event"] == "request" and "chat" in each["endpoint"]]
        assert [each["engine"] for each in lines] == talk.engines
