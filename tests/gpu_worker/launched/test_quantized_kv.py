"""Quantized KV with the Triton kernels and the CUDA branches: tokens are torch's; warm-up leaves nothing out."""

from collections.abc import Callable

import pytest

from penstock.ipc.messages import SamplingParams
from penstock.kernels.attention.kv_quantization import KV_FORMATS
from tests.faults.soak import only_in_soak
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@only_in_soak  # by default `test_quantized.py` does it with quantized weights
@pytest.mark.parametrize("kv", tuple(KV_FORMATS))
def test_tokens_are_those_of_torch(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """A prompt in chunks beside a decode, then both in a graph."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)  # it takes minutes
    folder, _ = checkpoint("llama")
    options = schedule(16, 16, 1, num_tokens=400) | {"max_num_seqs": 2, "kv_cache_dtype": kv}
    texts = prompts((21, 8), seed=3)
    expected = Engine(folder, cpu_kernels="torch", **options).run(texts, GREEDY)
    device = use_fake_cuda(monkeypatch)
    assert Engine(folder, device="cuda", **options).run(texts, GREEDY) == expected
    assert device.num_replays > 0


def test_warm_up_meets_every_kind_of_launch(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint("llama")
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # without running the kernels
    options = schedule(400, 16, 1, num_tokens=1600) | {"max_num_seqs": 4, "kv_cache_dtype": "int8"}
    engine = Engine(folder, device="cuda", **options)
    known = dict(kinds)
    kinds.clear()
    for length in (1, 2, 16, 17, 64, 65, 129, 300):
        engine.run(prompts((length,), seed=3), GREEDY)
    assert any("FORMAT=int8" in kind for kind in kinds if kind.startswith(("decode_kernel", "prefill_kernel")))
    new = [kind for kind in kinds if kind not in known]
    assert not new, "\n".join(new)
