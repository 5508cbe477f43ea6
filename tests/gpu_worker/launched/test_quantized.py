"""Quantized weights with the Triton kernels and the CUDA branches: tokens are torch's; warm-up leaves nothing out."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from penstock.ipc.messages import SamplingParams
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
MIXTURE = Case("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2})


@pytest.mark.parametrize(
    ("quantization", "is_mixture"),
    list(product(("int8", "int4", "fp8"), (False, True))) if IS_SOAK else [("int8", False)],
)
def test_tokens_are_those_of_torch(
    checkpoint: Callable[..., Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
    is_mixture: bool,
) -> None:
    """A prompt in chunks beside a decode, then both in a graph; keys and values are quantized, too."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)  # it takes minutes
    if is_mixture:
        Reference(tmp_path, MIXTURE)
    folder = tmp_path if is_mixture else checkpoint("llama")[0]
    options = schedule(16, 16, 1, num_tokens=400) | {"max_num_seqs": 2, "quantization": quantization}
    options |= {"kv_cache_dtype": "int4"}
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
    options = schedule(400, 16, 1, num_tokens=1600) | {"max_num_seqs": 4, "quantization": "int4"}
    engine = Engine(folder, device="cuda", **options)
    known = dict(kinds)
    kinds.clear()
    for length in (1, 2, 16, 17, 64, 65, 129, 300):
        engine.run(prompts((length,), seed=3), GREEDY)
    assert {kind.split()[0] for kind in kinds} >= {"quantized_linear_kernel", "quantized_vector_kernel"}
    new = [kind for kind in kinds if kind not in known]
    assert not new, "\n".join(new)
