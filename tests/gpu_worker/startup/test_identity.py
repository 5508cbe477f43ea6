"""What a worker says of itself, so that answers can say what they depend on."""

from pathlib import Path

import pytest

import penstock.demo
from penstock.config import Config, ModelOptions, SchedulerOptions, WorkerOptions
from penstock.gpu_worker.startup.start import start
from penstock.ipc.messages import WorkerHello


def hello(folder: Path, kernels: str = "torch", **options: object) -> WorkerHello:
    worker = {"device": "cpu", "dtype": "float32", "cpu_kernels": kernels, "num_pages": 32, "num_threads": 1} | options
    return start(
        Config(
            model=ModelOptions(model=str(folder)),
            scheduler=SchedulerOptions(max_num_seqs=2),
            worker=WorkerOptions(**worker),  # type: ignore[arg-type]
        )
    ).hello


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = Path(next(iter(penstock.demo.__path__))) / "model"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_one_bit_of_the_weights_is_another_digest(folder: Path) -> None:
    before = hello(folder)
    assert hello(folder) == before
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-5] ^= 1
    weights.write_bytes(changed)
    after = hello(folder)
    assert after.weights != before.weights
    assert (after.model_fingerprint, after.arithmetic) == (before.model_fingerprint, before.arithmetic)
    assert hello(folder, load_format="dummy").weights == "dummy"


def test_what_computes_is_told(folder: Path) -> None:
    torch, native = hello(folder), hello(folder, "native")
    assert torch.weights == native.weights
    assert torch.arithmetic != native.arithmetic
    assert (torch.is_batch_invariant, native.is_batch_invariant) == (False, True)
    assert hello(folder, "native", num_threads=2).arithmetic == native.arithmetic  # its sums have one order
    assert hello(folder, "torch", num_threads=2).arithmetic != torch.arithmetic
