"""Streams in the caller's event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from penstock import ApiError, AsyncLLM, ConfigError, RequestOutputKind, SamplingParams, engine_thread
from penstock.config import Config
from penstock.in_process import InProcessEngine
from tests.python_api.conftest import SMALL, Checkpoint


@pytest.fixture
async def llm(checkpoint: Checkpoint) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(checkpoint.folder, **SMALL) as made:
        yield made


def params(kind: RequestOutputKind, n: int = 2) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=20, n=n, ignore_eos=True, logprobs=1, output_kind=kind)


async def test_what_streams_tell(llm: AsyncLLM) -> None:
    [final] = [each async for each in llm.generate("a song", params(RequestOutputKind.FINAL_ONLY))]
    assert final.finished
    assert [len(each.token_ids) for each in final.outputs] == [20, 20]
    so_far = [each async for each in llm.generate("a song", params(RequestOutputKind.CUMULATIVE))]
    assert len(so_far) > 1  # tokens that come together are told together
    assert [each.outputs for each in so_far][-1] == final.outputs
    assert [each.finished for each in so_far] == [False] * (len(so_far) - 1) + [True]
    lengths = [len(each.outputs[0].token_ids) for each in so_far]
    assert lengths == sorted(lengths)
    pieces = [each async for each in llm.generate("a song", params(RequestOutputKind.DELTA))]
    for index, output in enumerate(final.outputs):
        own = [each.outputs[index] for each in pieces]
        assert "".join(each.text for each in own) == output.text
        assert [token_id for each in own for token_id in each.token_ids] == output.token_ids
        assert [entry for each in own for entry in each.logprobs or ()] == output.logprobs
        assert own[-1].finish_reason == "length"


async def test_streams_run_side_by_side_and_closing_one_aborts_it(llm: AsyncLLM) -> None:
    endless = SamplingParams(max_tokens=1900, ignore_eos=True)
    streams = [llm.generate("a", endless) for _ in range(3)]
    firsts = await asyncio.gather(*(anext(stream) for stream in streams))
    assert len({first.request_id for first in firsts}) == 3
    service = llm._service
    assert service is not None
    assert service.engine.num_live == 3
    for stream in streams:
        await stream.aclose()
    assert service.engine.num_live == 0
    short = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    [*_, last] = [each async for each in llm.chat([{"role": "user", "content": "b"}], short, request_id="mine")]
    assert last.request_id == "mine"
    assert len(last.outputs[0].token_ids) == 5


async def test_errors_come_with_the_first_output(llm: AsyncLLM) -> None:
    with pytest.raises(ApiError, match="2048 tokens"):
        await anext(llm.generate([5] * 2048))
    with pytest.raises(ApiError, match="messages"):
        await anext(llm.chat([{"role": "no role!", "content": "a"}]))


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_start_that_is_cancelled_leaves_nothing_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def loads_slowly(config: Config) -> InProcessEngine:
        has_begun.set()
        may_go_on.wait(60)
        return InProcessEngine(config)

    monkeypatch.setattr(engine_thread, "InProcessEngine", loads_slowly)
    llm = AsyncLLM(checkpoint.folder, **SMALL)
    starting = asyncio.create_task(llm.start())
    await asyncio.to_thread(has_begun.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConfigError, match="another LLM lives"):
        await AsyncLLM(checkpoint.folder, **SMALL).start()
    may_go_on.set()
    if is_closed:
        await llm.close()
        llm = AsyncLLM(checkpoint.folder, **SMALL)
    await llm.start()
    assert [each async for each in llm.generate("a", SamplingParams(max_tokens=1))][-1].finished
    await llm.close()


async def test_a_start_that_fails_can_be_tried_again(checkpoint: Checkpoint) -> None:
    llm = AsyncLLM(checkpoint.folder, num_threads=1, cpu_kv_cache_gib=1e-8)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no KV page"):
            await llm.start()
    await llm.close()
    async with AsyncLLM(checkpoint.folder, **SMALL):
        pass


async def test_a_stream_of_a_closed_one_ends(checkpoint: Checkpoint) -> None:
    llm = AsyncLLM(checkpoint.folder, **SMALL)
    stream = llm.generate("a", SamplingParams(max_tokens=1900, ignore_eos=True))
    await anext(stream)
    await llm.close()
    await llm.close()
    with pytest.raises(ApiError, match="closed"):
        [_ async for _ in stream]
    with pytest.raises(RuntimeError, match="closed"):
        await anext(llm.generate("a"))
