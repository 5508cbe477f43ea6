"""Models that run through `transformers`' code, with our pages behind it, give its tokens in every schedule."""

import os
from pathlib import Path

import pytest
import torch
import transformers

from penstock.config import ConfigError
from penstock.ipc.messages import SamplingParams
from penstock.models.parsing.by_transformers import architectures
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.transformers_checkpoints import MODELS, make_checkpoint, small_config

USUAL = ("deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama4_text", "mimo_v2_flash", "mixtral", "opt")
"""With latent attention, softcaps, windows, learned positions, sinks, layers without positions, heads of two sizes,
experts, a body within a body."""
NAMES = sorted(MODELS) if os.environ.get("PENSTOCK_SOAK") else USUAL

PROMPTS = prompts((1, 45, 17, 64), seed=1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
ROOMY, TIGHT = 1600, 160  # tokens in the pool


@pytest.mark.parametrize("model_type", NAMES)
def test_greedy_tokens(tmp_path: Path, model_type: str) -> None:
    """Cut into small chunks, from the prefix cache, after preemptions, ahead of results: always the same ones."""
    model = make_checkpoint(tmp_path, model_type)

    def run(engine: Engine) -> None:
        for prompt, (output,) in zip(PROMPTS, engine.run(PROMPTS, GREEDY), strict=True):
            assert greedy_errors(model, prompt, output)[0] == []

    engine = Engine(tmp_path, model_impl="transformers", **schedule(24, 16, 1, num_tokens=ROOMY, cached=True))
    run(engine)
    run(engine)
    assert engine.scheduler.stats().num_cached_tokens >= 96
    tight = TIGHT * (1 + len(engine.hello.window_groups))
    engine = Engine(tmp_path, model_impl="transformers", **schedule(512, 8, 2, num_tokens=tight))
    run(engine)
    assert engine.scheduler.stats().num_preemptions > 0 or engine.hello.window_groups


def test_own_code_and_theirs_agree(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    own, theirs = (Engine(tmp_path, model_impl=impl, num_pages=100) for impl in ("own", "transformers"))
    seeded = SamplingParams(max_tokens=12, temperature=0.9, top_k=20, seed=5)
    assert own.run(PROMPTS, seeded) == theirs.run(PROMPTS, seeded)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("diffllama", "DiffLlamaForCausalLM .*a layer attends twice"),
        ("falcon_mamba", "does not let others compute its attention"),
        ("minimax", "layers of kind linear_attention"),
        ("nemotron", "NemotronForCausalLM .* is not that of a causal decoder"),
        ("bloom", "does not let others compute its attention"),
    ],
)
def test_what_pages_cannot_serve_is_refused(tmp_path: Path, model_type: str, said: str) -> None:
    changes = {"num_key_value_heads": 2, "head_dim": 16} if model_type == "nemotron" else {}
    config = (
        small_config(model_type, **changes)
        if model_type != "falcon_mamba"
        else transformers.FalconMambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2)
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        Engine(tmp_path, model_impl="transformers")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text", "gpt_oss", "mixtral"])
def test_the_trial_bears_with_rounding(tmp_path: Path, model_type: str) -> None:
    make_checkpoint(tmp_path, model_type)
    engine = Engine(tmp_path, model_impl="transformers", dtype="bfloat16")
    assert [len(output) for (output,) in engine.run(PROMPTS, GREEDY)] == [12] * len(PROMPTS)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gpt2")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"only pickled weights"):
        Engine(tmp_path, model_impl="transformers")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gpt2")
    weights = {name: tensor for name, tensor in model.state_dict().items() if "h.2.mlp.c_fc" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=r"lacks transformer\.h\.2\.mlp\.c_fc"):
        Engine(tmp_path, model_impl="transformers")


def test_longrope_is_served_as_far_as_positions_mean_the_same_in_any_batch(tmp_path: Path) -> None:
    factors = [1.0 + i / 8 for i in range(8)]
    rope = {
        "rope_type": "longrope",
        "partial_rotary_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "rope_theta": 10000.0,
    }
    make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=128)
    engine = Engine(tmp_path, model_impl="transformers", num_pages=100)
    assert engine.hello.max_model_len == 128


def test_architectures_are_those_that_transformers_lists() -> None:
    """They are read from its source text, without importing it."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert set(architectures()) == set(names)
