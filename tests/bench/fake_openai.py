"""A streaming completions server with known delays, to hold the load generator's figures against."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass
class Behaviour:
    """What the fake does for every request, and what it saw."""

    first_after: float = 0.05
    gap: float = 0.02
    tokens_per_chunk: int = 1
    has_usage: bool = True
    has_tokenize: bool = True
    fail_every: int = 0  # every n-th request gets a 500
    failure: str = "no luck"  # what it says then
    field: str = "content"  # of deltas in a chat
    break_every: int = 0  # every n-th stream ends without [DONE]
    error_event_every: int = 0  # every n-th stream ends with an error event
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def _complete(behaviour: Behaviour, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    behaviour.bodies.append(body)
    number = len(behaviour.bodies)
    if behaviour.fail_every and number % behaviour.fail_every == 0:
        return web.json_response({"error": {"message": behaviour.failure}}, status=500)
    behaviour.in_flight += 1
    behaviour.most_in_flight = max(behaviour.most_in_flight, behaviour.in_flight)
    try:
        return await _stream(behaviour, request, body, number)
    finally:
        behaviour.in_flight -= 1


async def _stream(behaviour: Behaviour, request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    is_chat = "messages" in body
    if is_chat:
        await response.write(_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    await response.write(b": keep-alive\n\n")
    left = body["max_tokens"]
    delay = behaviour.first_after
    while left:
        await asyncio.sleep(delay)
        delay = behaviour.gap
        count = min(behaviour.tokens_per_chunk, left)
        left -= count
        text = "w " * count
        choice: dict[str, Any] = {"index": 0, "finish_reason": None if left else "length"}
        choice |= {"delta": {behaviour.field: text}} if is_chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [7] * count
        data = _event({"choices": [choice]})
        await response.write(data[:9])  # a border inside an event
        await response.write(data[9:])
    if behaviour.error_event_every and number % behaviour.error_event_every == 0:
        await response.write(_event({"error": {"message": "the engine died"}}))
        return response
    if behaviour.break_every and number % behaviour.break_every == 0:
        return response
    if behaviour.has_usage:
        usage = {
            "prompt_tokens": 11,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        await response.write(_event({"choices": [], "usage": usage}))
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def fake_openai(behaviour: Behaviour) -> AsyncIterator[str]:
    """Serve until the block ends; gives the base URL."""
    app = web.Application()

    async def complete(request: web.Request) -> web.StreamResponse:
        return await _complete(behaviour, request)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def tokenize(request: web.Request) -> web.Response:
        if not behaviour.has_tokenize:
            raise web.HTTPNotFound
        return web.json_response({"tokens": [5, 6, 7, 8]})

    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
