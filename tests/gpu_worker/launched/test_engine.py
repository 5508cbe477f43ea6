"""The engine with its CUDA branches and Triton kernels: tokens equal transformers' and the CPU path's."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.gpu_worker.steps import logprobs
from penstock.ipc.messages import SamplingParams
from tests.faults.soak import sized
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds

Make = Callable[..., Checkpoint]

NUM_NEW = 4
PROMPTS = prompts((30, 14, 15), seed=2)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=NUM_NEW,
    temperature=0.9,
    top_k=60,
    top_p=0.9,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((7, 2.0), (9, -3.0)),
    min_tokens=3,
    stop_token_ids=(7,),
    seed=2**40 + 5,
    num_logprobs=2,
)
SAMPLING = (replace(GREEDY, prompt_logprobs=3, num_logprobs=1), EVERYTHING, replace(EVERYTHING, logit_bias=(), seed=3))


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the interpreter minutes."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)


@pytest.mark.parametrize(("name", "eager"), [("llama-dynamic", False), ("qwen3", True)][: sized(1, 2)])
def test_greedy_equals_transformers(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str, eager: bool) -> None:
    """Chunked prefill beside decodes, a pool that preempts; graphs with padded rows."""
    folder, model = checkpoint(name)
    device = use_fake_cuda(monkeypatch)
    options = schedule(24, 16, 1, num_tokens=64)
    engine = Engine(folder, device="cuda", enforce_eager=eager, max_num_seqs=4, **options)
    outputs = engine.run(PROMPTS, GREEDY)
    monkeypatch.undo()  # transformers' tensors are no CUDA tensors
    for prompt, (output,) in zip(PROMPTS, outputs, strict=True):
        assert greedy_errors(model, prompt, output)[0] == []
    assert (device.num_replays > 0) == (not eager)
    assert engine.scheduler.stats().num_preemptions > 0


def test_padding_touches_no_sequence_s_page(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows are padded to four while they hold every page of the pool; again after a Welcome."""
    folder, model = checkpoint("llama")
    use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", max_num_seqs=4, **schedule(64, 16, 0, num_tokens=48))
    short = prompts((5, 6, 7), seed=4)
    outputs = engine.run(short, GREEDY)
    engine.runner.clear_rows()
    outputs += engine.run(short, GREEDY)
    monkeypatch.undo()
    for prompt, (output,) in zip(short * 2, outputs, strict=True):
        assert greedy_errors(model, prompt, output)[0] == []


def test_sampling_and_logprobs_equal_the_cpu_path(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a Welcome, which clears the rows but not what padding needs, and with pages from the prefix cache."""
    folder, _ = checkpoint("llama")
    options = schedule(24, 16, 1, num_tokens=400, cached=True) | {"max_num_seqs": 4}
    plain = Engine(folder, **options)
    expected = plain.run(PROMPTS, SAMPLING)
    device = use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", **options)
    assert engine.run(PROMPTS, SAMPLING) == expected
    engine.runner.clear_rows()
    again = engine.run(PROMPTS, SAMPLING)
    assert again == expected
    assert device.num_replays > 0


def test_warm_up_meets_every_kind_of_launch(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that serving launches afterwards would be compiled anew."""
    folder, _ = checkpoint("mistral-window")
    monkeypatch.undo()  # with the real warm-up
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # and without running the kernels
    monkeypatch.setattr(logprobs, "_LOGITS_BYTES", 4 * 3 * 199)  # prompts are scored three positions at a time
    options = schedule(100, 16, 1, num_tokens=3000, cached=True)
    engine = Engine(folder, device="cuda", max_num_seqs=6, **options)
    known = dict(kinds)
    kinds.clear()
    requests = [replace(params, stop_token_ids=(), max_tokens=4) for params in SAMPLING] * 4
    requests += [replace(GREEDY, max_tokens=3), replace(GREEDY, temperature=1.0), replace(GREEDY, num_logprobs=4)] * 3
    # Longer lists than warm-up's, and a prompt whose pieces begin anywhere.
    requests += [
        replace(GREEDY, max_tokens=2, logit_bias=tuple((i, 0.5) for i in range(20))),
        replace(GREEDY, max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(100))),
        replace(GREEDY, max_tokens=2, num_logprobs=4, prompt_logprobs=4),
    ]
    lens = (1, 2, 5, 17, 30, 90, 99, 150, 300, 3, 4, 40, 70, 16, 8, 200, 480, 6, 11, 65, 64, 12, 13, 50)
    engine.run(prompts(lens, seed=3), requests)
    assert kinds
    new = [kind for kind in kinds if kind not in known]
    assert not new, "\n".join(new)


@pytest.mark.parametrize(("name", "eager"), [("qwen2-some-windows", False), ("mistral-window", True)][: sized(1, 2)])
def test_page_groups(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str, eager: bool) -> None:
    """Layers with a window in a group of their own; a prompt longer than it, and pages that were behind it."""
    folder, model = checkpoint(name)
    device = use_fake_cuda(monkeypatch)
    options = schedule(24, 4, 1, num_tokens=140)
    engine = Engine(folder, device="cuda", enforce_eager=eager, max_num_seqs=4, **options)
    outputs = engine.run(PROMPTS, GREEDY)
    monkeypatch.undo()
    for prompt, (output,) in zip(PROMPTS, outputs, strict=True):
        assert greedy_errors(model, prompt, output)[0] == []
    assert (device.num_replays > 0) == (not eager)
