"""A head that listens to layers of the model, with the CUDA branches and graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.parts.drafts.worker.eagle_heads import eagle3_guesses, write_eagle3
from tests.parts.drafts.worker.engines import GREEDY, spied, with_head

PROMPTS = prompts((12,), seed=2)
FEW = replace(GREEDY, max_tokens=4)
TAPS = (1, 0, 1)


def test_guesses_and_tokens_are_those_of_the_cpu(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)
    folder, model = checkpoint("llama")
    options = schedule(8, 16, 1, num_tokens=64) | {"max_num_seqs": 2}
    expected = Engine(folder, **options).run(PROMPTS, FEW)
    ids = {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    head = write_eagle3(tmp_path, model, torch.arange(0, 199, 3), eagle_config=ids)
    device = use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", **with_head(tmp_path, 2, "eagle3"), **options)
    noted = spied(engine)
    assert engine.run(PROMPTS, FEW) == expected
    assert device.num_replays > 0
    assert noted
    for text, guesses in noted:
        assert guesses == eagle3_guesses(model, head, TAPS, text, len(guesses))
