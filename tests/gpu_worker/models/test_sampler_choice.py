"""The sampler is the one for the logits that the model returns, whatever kernels the device offers."""

from collections.abc import Callable

import pytest
import torch

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.loading.loader import load_model
from penstock.gpu_worker.startup import loaded
from penstock.ipc.messages import SamplingParams
from penstock.kernels.native.build import BuildError, build
from penstock.models.description.model_config import ModelConfig
from penstock.models.files.source import Checkpoint as Source
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine

PROMPTS = prompts((1, 2, 33, 70), seed=5)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SEEDED = SamplingParams(max_tokens=8, temperature=0.9, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.2)
TOLD = SamplingParams(max_tokens=8, temperature=0.9, seed=4, num_logprobs=2, prompt_logprobs=1)


def load_for_torch(source: Source, config: ModelConfig, dtype: torch.dtype, device: Device, *_: object) -> DecoderModel:
    """A model that has no use for the native kernels, which the device offers nevertheless."""
    assert device.library is not None
    model = load_model(source, config, dtype, CpuDevice(1))
    assert isinstance(model, DecoderModel)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_on_torch_beside_native_kernels(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(str(error))
    folder, _ = checkpoint("llama")
    sampling = [GREEDY, SEEDED, TOLD, SEEDED]
    expected = Engine(folder, dtype=dtype, cpu_kernels="torch").run(PROMPTS, sampling)
    monkeypatch.setattr(loaded, "load_model", load_for_torch)
    engine = Engine(folder, dtype=dtype, cpu_kernels="native")
    assert engine.run(PROMPTS, sampling) == expected
