"""Connections that break at any byte, while worker and scheduler die, and any of two frontends goes on."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.servers import serving
from tests.faults.clockwork import expected_text, make_clockwork
from tests.faults.soak import only_in_soak, sized
from tests.faults.streams import client
from tests.frontend.cut_streams import CutClient

NUM_CUTS, NUM_STREAMS, NUM_TOKENS = sized(10, 50), sized(2, 4), 400


@dataclass
class Listening:
    """A server that listens there."""

    port: int


def cut(port: int, index: int, prompt: list[int]) -> str:
    """The text of one stream that was cut again and again."""
    drawn = random.Random(index)
    stream = CutClient(Listening(port), f"s{index}")
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    stream.post("/v1/completions", body, 200 + drawn.randrange(1500))
    for number in range(NUM_CUTS):
        stream.go_on(drawn.randrange(3000) if number < NUM_CUTS - 1 else None, by_header=number % 2 == 1)
    assert stream.is_complete
    *events, done = [event.removeprefix(b"data: ") for event in stream.events]
    assert done == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@only_in_soak
async def test_streams_are_whole_whatever_breaks(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    faults = {FAULTS: "worker.computed:kill@60,scheduler.tokens:kill@150", ONCE: str(tmp_path)}
    flags = ("--served-model-name", "m", "--num-frontends", "2", "--spare-worker")
    prompts = [[3 + index, 6, 7, 8] for index in range(NUM_STREAMS)]
    async with serving(folder, *flags, **faults) as server, client() as http:
        port = int(server.url.rpartition(":")[2])
        found = await asyncio.gather(*(asyncio.to_thread(cut, port, i, prompt) for i, prompt in enumerate(prompts)))
        assert found == [expected_text(prompt, NUM_TOKENS) for prompt in prompts]
        deaths = Counter(entry["child"] for entry in server.log if entry["event"] == "process exited, restarting")
        assert deaths == {"penstock-worker-0": 1, "penstock-scheduler": 1}
        await server.settled(http)
