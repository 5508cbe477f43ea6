"""EAGLE-3 heads: what they guess, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import ConfigError
from penstock.parts.drafts.checkpoints.check import check_drafter
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config, schedule
from tests.parts.drafts.worker.eagle_heads import eagle3_guesses, write_eagle3
from tests.parts.drafts.worker.engines import GREEDY, PROMPTS, spied, with_head

Make = Callable[..., Checkpoint]
NAMED = torch.randperm(199, generator=torch.Generator().manual_seed(1))[:60].sort().values


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_guesses_are_those_of_the_layout(checkpoint: Make, tmp_path: Path, kernels: str, layout: str) -> None:
    folder, model = checkpoint("llama", num_hidden_layers=6)
    taps, is_plain = ((2, 3, 3), True) if layout == "plain" else ((1, 4, 5), False)
    prefix = "midlayer." if is_plain else "layers.0."
    head = write_eagle3(tmp_path, model, NAMED, prefix=prefix)
    if not is_plain:
        path = tmp_path / "config.json"
        inner = json.loads(path.read_text())
        path.write_text(
            json.dumps(
                {
                    "architectures": ["Eagle3Speculator"],
                    "speculators_model_type": "eagle3",
                    "draft_vocab_size": inner.pop("draft_vocab_size"),
                    "norm_before_residual": True,
                    "eagle_aux_hidden_state_layer_ids": list(taps),
                    "transformer_layer_config": inner,
                }
            )
        )
        tensors = load_file(tmp_path / "model.safetensors")
        head["embed_tokens.weight"] = tensors["embed_tokens.weight"] = torch.randn(199, 64)
        save_file(tensors, tmp_path / "model.safetensors")
    options = schedule(24, 16, 1, num_tokens=3200) | {"cpu_kernels": kernels}
    engine = Engine(folder, **options, **with_head(tmp_path, 3, "eagle3"))
    noted = spied(engine)
    engine.run(PROMPTS, GREEDY)
    assert noted
    for text, guesses in noted[::5]:
        assert guesses
        assert guesses == eagle3_guesses(model, head, taps, text, len(guesses), norm_before_residual=not is_plain)


def test_wrong_heads_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama", num_hidden_layers=6)

    def refused(said: str, method: str = "eagle3") -> None:
        with pytest.raises(ConfigError, match=said):
            check_drafter(make_config(folder, **with_head(tmp_path, 3, method)))

    def changed(**changes: Any) -> None:
        write_eagle3(tmp_path, model, NAMED, **changes)

    changed()
    check_drafter(make_config(folder, **with_head(tmp_path, 3, "eagle3")))
    refused("draft_vocab_size|it has d2t|midlayer|it lacks", "eagle")
    changed(vocab_size=300)
    refused("vocabulary of 300; this model's is 199")
    changed(target_hidden_size=96)
    refused("hidden size of 96; this model's is 64")
    changed(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 40]})
    refused(r"listens to layers \[1, 2, 40\], but this model has 6")
    changed(draft_vocab_size=50)
    refused(r"its d2t has shape \[60\], but should have \[50\]|lm_head.weight has shape \[60, 64\]")
    changed()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 100}, tmp_path / "model.safetensors")
    refused("d2t does not name 60 different tokens of this model's 199")
    save_file({name: its for name, its in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    refused("it lacks d2t")
