"""What PEFT writes of every kind of product that families have, beside what PEFT computes."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from penstock.parts.adapters.scheduler import AdapterGate
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import one_thread
from tests.gpu_worker.families.checkpoints import Answer, Reference
from tests.gpu_worker.families.run import GREEDY, Scored
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_images import SeeingReference
from tests.parts.adapters.test_parity import load

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

_ALL = {"target_modules": "all-linear"}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _ALL | {"fan_in_fan_out": True},
    "gpt_neox": _ALL,
    "phi3": {"target_modules": r".*\.1\.(self_attn\.qkv_proj|mlp\.gate_up_proj)"},
    "glm4": {"target_modules": ["gate_up_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "gemma3": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {r"^model.layers.0.self_attn.q_proj": 9}},
    "deepseek_v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], "use_rslora": True},
    "qwen3_moe": {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"layers.0.self_attn.v_proj": 1}},
    "bamba": {"target_modules": ["in_proj", "q_proj", "down_proj"]},
    "nemotron_h": {"target_modules": ["in_proj", "q_proj", "o_proj", "up_proj"]},
    "qwen3_5_text": {"target_modules": r".*(in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|linear_attn\.out_proj|q_proj)"},
}
PROMPTS = prompts((5, 33), seed=3)


@pytest.mark.parametrize("name", _CONFIGS)
def test_like_peft(tmp_path: Path, name: str) -> None:
    """Merged and not: tokens, and log-probabilities that differ from those of the model itself."""
    reference = Reference(tmp_path / "model", CASES[name])
    config = peft.LoraConfig(**{"r": 5, "lora_alpha": 20, "init_lora_weights": False} | _CONFIGS[name])
    theirs = peft.get_peft_model(deepcopy(reference.model), config).eval()
    theirs.save_pretrained(str(tmp_path / "one"))
    merged = deepcopy(theirs).merge_and_unload()
    for kernels in ("native", "torch"):
        engine = Scored(tmp_path / "model", model_impl="own", cpu_kernels=kernels)
        key = load(engine, "one", tmp_path / "one")
        engine.make_ready()
        gate = engine.scheduler.parts.get(AdapterGate)
        assert gate is not None
        assert gate.known[key].error == ""
        found = answers(engine, key)
        for like in (theirs, merged):
            for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
                best = scores(like, prompt, tokens)
                assert best.indices[:, 0].tolist() == tokens
                assert best.values[:, 0].tolist() == pytest.approx(logprobs, abs=2e-3)
        assert found != answers(engine, "")


def test_a_model_that_sees(tmp_path: Path) -> None:
    """Adapters of its language part are served; one that changes its tower is refused by the module's name."""
    reference = SeeingReference(tmp_path, "qwen3-vl", [])
    engine = Scored(reference.folder, model_impl="own", cpu_kernels="native")
    gate = engine.scheduler.parts.get(AdapterGate)
    assert gate is not None
    for name, modules, why in (
        ("text", r".*language_model.*\.(q_proj|down_proj)", ""),
        (
            "tower",
            r".*(visual\.blocks\.0\.attn\.qkv|language_model.*q_proj)",
            "it changes 'model.visual.blocks.0.attn.qkv'",
        ),
    ):
        config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        theirs = peft.get_peft_model(deepcopy(reference.model), config).eval()
        theirs.save_pretrained(str(tmp_path / name))
        key = load(engine, name, tmp_path / name)
        engine.make_ready()
        assert why in gate.known[key].error
        if not why:
            for prompt, (tokens, _) in zip(PROMPTS, answers(engine, key), strict=True):
                assert scores(theirs, prompt, tokens).indices[:, 0].tolist() == tokens


def answers(engine: Scored, key: str) -> list[Answer]:
    """What follows each prompt."""
    ids = [engine.add(prompt, GREEDY, adapter=key) for prompt in PROMPTS]
    engine.drain()
    return [engine.answer(request_id) for request_id in ids]


@torch.inference_mode()
def scores(model: Callable[[torch.Tensor], Any], prompt: list[int], tokens: list[int]) -> Any:
    """The best token at each of these places, and its log-probability."""
    logits: torch.Tensor = model(torch.tensor([prompt + tokens[:-1]])).logits[0, -len(tokens) :]
    return logits.float().log_softmax(-1).topk(1)
