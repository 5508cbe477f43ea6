"""Either side of a handover dies, at any moment of it: streams have the same tokens, and all pages are free or cached
afterwards. By default two of the processes, while pages are read; in soak each of them, at each moment."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from penstock.ipc.messages import SamplingParams
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import Engine as Alone
from tests.handover.conftest import launched
from tests.handover.engines import Engines

PROMPTS = prompts((300, 280, 260, 290, 310), seed=8)
SAMPLING = SamplingParams(max_tokens=60, temperature=0.7, seed=5)
MOMENTS = ("before", "during", "after") if IS_SOAK else ("during",)
VICTIMS = (
    [(engine, name) for engine in (0, 1) for name in ("worker", "scheduler")]
    if IS_SOAK
    else [(0, "worker"), (1, "scheduler")]
)


def test_streams_survive(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for all deaths: each victim is replaced before the next one dies."""
    expected = Alone(llama, num_pages=256).run(PROMPTS, SAMPLING)
    monkeypatch.setenv("PENSTOCK_FAULTS", "worker.handover:delay=0.01")  # each read of a few pages takes longer

    async def check(engines: Engines, engine: int, name: str, moment: str) -> None:
        engines.book.reset_prefix_cache()
        decode = engines.engines[1]
        sinks = [engines.submit(prompt, SAMPLING) for prompt in PROMPTS]
        if moment == "during":
            async with asyncio.timeout(60):
                while not decode.handover.num_waiting:  # noqa: ASYNC110 (nobody tells)
                    await asyncio.sleep(0.005)
        elif moment == "after":
            await sinks[0].until(5)
        engines.engines[engine].kill(name)
        assert [await sink.result(90) for sink in sinks] == expected
        await engines.ready()
        await engines.settled()

    with launched(llama, "prefill", "decode", max_num_batched_tokens=32) as launch:
        for moment in MOMENTS:
            for engine, name in VICTIMS:
                launch.do(partial(check, engine=engine, name=name, moment=moment), 300)


def test_a_transport_that_fails_is_switched_off(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed here; the next one comes by another transport; metrics and the log say so."""
    expected = Alone(llama, num_pages=256).run(PROMPTS[:3], SAMPLING)
    monkeypatch.setenv("PENSTOCK_FAULTS", "worker.handover:raise@3")

    async def check(engines: Engines) -> None:
        decode = engines.engines[1]
        for prompt, tokens in zip(PROMPTS[:3], expected, strict=True):
            assert await engines.run([prompt], SAMPLING) == [tokens]
        await engines.settled()
        assert decode.handover.failed_transports == ("shared_memory",)
        assert (decode.handover.num_failed, decode.handover.num_received) == (1, 2)

    with launched(llama, "prefill", "decode") as launch:
        launch.do(check)
