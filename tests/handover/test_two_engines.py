"""A prefill and a decode engine as real processes: outputs are those of one engine, pages move once, all are free at
the end."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import Engine as Alone
from tests.handover.conftest import Launch, launched
from tests.handover.engines import Engine, Engines

PROMPTS = prompts((200, 150, 60, 16, 300, 33), seed=3)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SEEDED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11)
PAGE_BYTES = 8192  # 16 tokens of this model in fp32


@pytest.fixture(scope="module")
def alone(llama: Path) -> Alone:
    return Alone(llama, num_pages=256)


@pytest.fixture(scope="module")
def launch(llama: Path) -> Iterator[Launch]:
    with launched(llama, "prefill", "decode") as found:
        yield found


def check_exact(engines: Engines) -> None:
    """Every page that was sent was received once, as all of its bytes."""
    prefill, decode = engines.engines
    ours, theirs = decode.handover, prefill.handover
    assert ours.num_received_pages == theirs.num_sent_pages
    assert ours.num_received == theirs.num_sent


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_outputs_are_those_of_one_engine(launch: Launch, alone: Alone, sampling: SamplingParams) -> None:
    async def check(engines: Engines) -> None:
        engines.book.reset_prefix_cache()
        _, decode = engines.engines
        before = decode.handover
        assert await engines.run(PROMPTS, sampling, n=2) == expected
        await engines.settled()
        after = decode.handover
        num_pages = sum((len(prompt) - 1) // 16 for prompt in PROMPTS if len(prompt) > 32)
        assert after.num_received - before.num_received == 5
        assert after.num_received_pages - before.num_received_pages == num_pages
        assert after.num_received_bytes - before.num_received_bytes == num_pages * PAGE_BYTES, "pages move once"
        check_exact(engines)

    expected = alone.run(PROMPTS, sampling, n=2)
    launch.do(check)


def test_prefixes_are_found_on_either_side(launch: Launch, alone: Alone) -> None:
    """What the decode engine has is not sent; what the prefill engine has is not computed."""
    base = prompts((160,), seed=9)[0]
    more = [base + tail for tail in prompts((50, 70), seed=10)]
    expected = [alone.run([prompt], GREEDY)[0] for prompt in (base, *more, base)]

    async def check(engines: Engines) -> None:
        prefill, decode = engines.engines
        found = [(await engines.run([prompt], GREEDY))[0] for prompt in (base, *more)]
        await engines.settled()
        received, computed = decode.handover.num_received_pages, prefill.stats.num_prompt_tokens
        await engines.set_role(decode, "both")  # it serves alone, and only its own cache is reset
        await engines.set_role(decode, "decode")
        engines.engines[1].link.send(Reset)
        await asyncio.sleep(0.3)
        sink = engines.submit(base, GREEDY)
        found.append(await sink.result())
        assert sink.num_cached >= 128, "the prefill engine had it"
        await engines.settled()
        assert found == expected
        assert decode.handover.num_received_pages - received == 9
        assert prefill.stats.num_prompt_tokens - computed == 144
        check_exact(engines)

    from penstock.ipc.messages import ResetPrefixCache

    Reset = ResetPrefixCache()
    launch.do(check)


def test_prompt_logprobs_are_computed_where_the_request_is(launch: Launch, alone: Alone) -> None:
    asking = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=0)
    prompt = prompts((120,), seed=21)[0]
    expected = alone.run([prompt], GREEDY)[0][0][:5]

    async def check(engines: Engines) -> None:
        before = engines.engines[1].handover.num_received
        sink = engines.submit(prompt, asking)
        assert await sink.result() == [expected]
        assert len(sink.prompt_logprobs) == 119
        await engines.settled()
        assert engines.engines[1].handover.num_received == before

    launch.do(check)


def test_pauses_and_aborts_while_pages_come(launch: Launch, alone: Alone) -> None:
    many = prompts(tuple(range(200, 320, 10)), seed=5)
    expected = [alone.run([prompt], GREEDY)[0] for prompt in many]

    async def check(engines: Engines) -> None:
        sinks = [engines.submit(prompt, GREEDY) for prompt in many]
        names = list(engines.book._live)
        for i, name in enumerate(names):
            await asyncio.sleep(0.002)
            if i % 3 == 0:
                engines.book.abort(name)
            elif i % 3 == 1:
                engines.book.pause(name)
        await asyncio.sleep(0.1)
        for name in names:
            engines.book.resume(name)
        for i, (sink, tokens) in enumerate(zip(sinks, expected, strict=True)):
            if i % 3:
                assert await sink.result() == tokens
        await engines.settled()

    launch.do(check)


def test_roles_change_at_run_time(launch: Launch, alone: Alone) -> None:
    """Streams go on; nobody waits for a role that no engine has."""
    fresh = prompts((210, 190, 170, 230), seed=33)
    expected = [alone.run([prompt], GREEDY)[0] for prompt in fresh]

    async def one(engines: Engines, i: int) -> tuple[int, int]:
        before = [_tokens(engine) for engine in engines.engines]
        assert await engines.run([fresh[i]], GREEDY) == [expected[i]]
        await engines.settled()
        after = [_tokens(engine) for engine in engines.engines]
        return after[0] - before[0], after[1] - before[1]

    async def check(engines: Engines) -> None:
        first, second = engines.engines
        await engines.set_role(second, "prefill")  # two prefill engines: either serves alone
        assert sorted(await one(engines, 0)) == [0, 20]
        await engines.set_role(first, "decode")  # the other way round
        received = first.handover.num_received
        assert await one(engines, 1) == (20, 1)
        assert first.handover.num_received == received + 1
        await engines.set_role(second, "decode")  # nobody computes prompts for others
        assert sorted(await one(engines, 2)) == [0, 20]
        await engines.set_role(first, "prefill")
        assert await one(engines, 3) == (1, 20)

    launch.do(check)


def _tokens(engine: Engine) -> int:
    return engine.stats.num_output_tokens
