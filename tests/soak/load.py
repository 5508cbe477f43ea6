"""Clients that never rest: streams with an oracle, whole answers, clients that leave, requests that mean nothing."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from typing import Any

import aiohttp

from tests.faults.clockwork import expected_text

SHARED = [5 + i % 80 for i in range(200)]
INVALID: list[bytes] = [
    b"{",
    b'{"model": "m"}',
    b'{"model": "m", "prompt": [5], "temperature": -1}',
    b'{"model": "m", "prompt": [5], "max_tokens": "many"}',
    b'{"model": "m", "prompt": [1000000]}',
    b'{"model": "other", "prompt": [5]}',
    b'{"model": "m", "prompt": ' + json.dumps([5] * 5000).encode() + b"}",
    b'{"model": "m", "prompt": [5], "structured_outputs": {"regex": "(("}}',
    b'{"model": "m", "prompt": [5], "structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}',
]
KINDS = {"stream": 60, "whole": 15, "leave": 10, "invalid": 10, "regex": 5}


class Load:
    """Some clients, until they are told to stop; what they saw."""

    def __init__(self, url: str, seed: int, num_clients: int) -> None:
        self._url = f"{url}/v1/completions"
        self._rng = random.Random(seed)
        self._num_clients = num_clients
        self._is_over = False
        self.num_ended: Counter[str] = Counter()
        self.violations: list[str] = []
        self.longest_gap = 0.0

    async def run(self) -> None:
        """Until `stop`; requests under way are finished."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self._num_clients)))

    def stop(self) -> None:
        """Begin nothing new."""
        self._is_over = True

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while not self._is_over:
            (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
            try:
                await getattr(self, f"_{kind}")(http)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                self._blame(kind, repr(error))
            self.num_ended[kind] += 1
            await asyncio.sleep(self._rng.random() * 0.05)

    def _blame(self, kind: str, what: str) -> None:
        self.violations.append(f"{time.strftime('%H:%M:%S')} {kind}: {what[:300]}")

    def _ask(self) -> tuple[list[int], int]:
        rng = self._rng
        if rng.random() < 0.5:
            prompt = SHARED[: rng.randrange(1, 200)]
        else:
            prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(1, 120))]
        return prompt, rng.randrange(1, 80)

    def _body(self, prompt: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0} | fields

    async def _stream(self, http: aiohttp.ClientSession) -> None:
        prompt, num_tokens = self._ask()
        text, ends, last = "", list[str](), time.monotonic()
        async with http.post(self._url, json=self._body(prompt, num_tokens, stream=True)) as response:
            if response.status != 200:
                self._blame("stream", f"status {response.status}: {await response.text()}")
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                last, self.longest_gap = now, max(self.longest_gap, now - last)
                if line.startswith(b"data: [DONE]"):
                    ends.append("[DONE]")
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    ends.append(str(event["error"]))
                    continue
                for choice in event["choices"]:
                    text += choice["text"]
                    ends += [choice["finish_reason"]] * bool(choice["finish_reason"])
        if ends != ["length", "[DONE]"] or text != expected_text(prompt, num_tokens):
            self._blame("stream", f"{prompt[:5]}… of {len(prompt)}, {num_tokens}: {ends}, {len(text)} characters")

    async def _whole(self, http: aiohttp.ClientSession) -> None:
        prompt, num_tokens = self._ask()
        async with http.post(self._url, json=self._body(prompt, num_tokens, n=2)) as response:
            answer = await response.json()
        texts = [choice["text"] for choice in answer["choices"]]
        if texts != [expected_text(prompt, num_tokens)] * 2:
            self._blame("whole", f"{prompt[:5]}… of {len(prompt)}, {num_tokens}: {[len(text) for text in texts]}")

    async def _leave(self, http: aiohttp.ClientSession) -> None:
        prompt, num_tokens = self._ask()
        body = self._body(prompt, 10 * num_tokens, stream=self._rng.random() < 0.7)
        asked = asyncio.create_task(http.post(self._url, json=body))
        await asyncio.sleep(self._rng.random() * 0.3)
        if asked.done():
            asked.result().close()
        else:
            asked.cancel()

    async def _invalid(self, http: aiohttp.ClientSession) -> None:
        body = self._rng.choice(INVALID)
        async with http.post(self._url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status not in (400, 404):
                self._blame("invalid", f"status {response.status} for {body[:80]!r}")

    async def _regex(self, http: aiohttp.ClientSession) -> None:
        pattern = f"[a-f]{{{self._rng.randrange(1, 30)}}}[0-9]+;"
        body = self._body([7], 100, structured_outputs={"regex": pattern}, temperature=1, seed=self._rng.randrange(99))
        async with http.post(self._url, json=body) as response:
            choice = (await response.json())["choices"][0]
        if choice["finish_reason"] == "stop" and not re.fullmatch(pattern, choice["text"]):
            self._blame("regex", f"{choice['text']!r} is no {pattern}")
