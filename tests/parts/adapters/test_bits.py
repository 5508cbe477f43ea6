"""On the native kernels a row's bits are its own: alone, beside others, in any chunk, on any number of threads."""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.conftest import Checkpoint, checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.adapters.test_parity import PROMPTS, load
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint"]
Make = Callable[..., Checkpoint]
RANKS = {"a": 3, "b": 16, "c": 64}


def scores(engine: Engine, asks: Sequence[tuple[list[int], str]]) -> list[bytes]:
    """The log-probabilities of all outputs, bit by bit, of requests that run together."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=2)
    found = {engine.add(prompt, sampling, adapter=adapter): b"" for prompt, adapter in asks}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.finish_reason != "error", delta.error
            if delta.logprobs is not None:
                found[delta.request_id] += bytes(delta.logprobs.logprobs)
    return list(found.values())


def test_bits_do_not_depend_on_neighbours(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    for number, (key, rank) in enumerate(RANKS.items()):
        write_adapter(tmp_path / key, model, rank, seed=number)
    expected: list[bytes] = []
    for num_threads, budget in ((1, 4096), (2, 16)):
        engine = Engine(
            folder, cpu_kernels="native", **schedule(budget, 16, 1, num_tokens=6400) | {"num_threads": num_threads}
        )
        keys = [load(engine, name, tmp_path / name) for name in RANKS]
        asks = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", *keys)]
        expected = expected or [bits for ask in asks for bits in scores(engine, [ask])]
        assert all(len(bits) == 8 * 3 * 4 for bits in expected)
        assert scores(engine, asks) == expected
    assert len(set(expected)) == len(asks)
