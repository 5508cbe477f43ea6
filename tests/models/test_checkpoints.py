"""What a configuration and a name of a checkpoint mean, whatever they hold."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.__main__ import main
from penstock.config import Config, ConfigError, ModelOptions
from penstock.models.description.decoder import Decoder
from penstock.models.description.encoder import Encoder
from penstock.models.families.registry import ARCHITECTURES, parse_model_config
from penstock.models.finding.located import hub_cache, located
from penstock.models.finding.registry import open_checkpoint, served_model_names
from penstock.models.weights.decoder import decoder_tensors
from penstock.models.weights.encoder import encoder_tensors
from tests.models.broken_checkpoints import BASE, check_sentence

# Every field that is read, and values that are good together with some kind of the others.
FIELDS: dict[str, list[Any]] = {
    "architectures": [[name] for name in ARCHITECTURES],
    "auto_map": [None],
    "quantization_config": [None, {"quant_method": "gptq"}],
    "vision_config": [None, {}],
    "vocab_size": [32],
    "hidden_size": [16],
    "num_hidden_layers": [1, 2],
    "num_attention_heads": [2],
    "num_key_value_heads": [None, 1, 2],
    "head_dim": [None, 8],
    "hidden_act": [None, "gelu"],
    "max_position_embeddings": [None, 64],
    "rms_norm_eps": [None, 1e-5],
    "attention_bias": [None, True],
    "mlp_bias": [None, True],
    "tie_word_embeddings": [None, True],
    "dtype": [None, "bfloat16"],
    "torch_dtype": [None, "torch.float32"],
    "sliding_window": [None, 8],
    "use_sliding_window": [None, True],
    "max_window_layers": [None, 0],
    "layer_types": [None, ["full_attention"] * 2],
    "rope_theta": [None, 1e6],
    "partial_rotary_factor": [None, 1.0],
    "original_max_position_embeddings": [None, 32],
    "rope_scaling": [None],
    "rope_parameters": [None],
    "word_embed_proj_dim": [None, 16],
    "n_embd": [None, 16],
    "sliding_window_pattern": [None, 1],
    "first_k_dense_replace": [None, 1],
    "n_head": [None, 2],
    "n_layer": [None, 2],
    "n_group": [None, 2],
    "num_experts_per_tok": [None, 2],
    "n_routed_experts": [None, 2],
    "num_local_experts": [None, 2],
    "intermediate_size": [24],
    "moe_intermediate_size": [None, 24],
    "ffn_dim": [None, 24],
    "logits_scaling": [None, 0.5],
    "rotary_pct": [None, 0.5],
    "qk_layernorm": [None, True],
    "use_qk_norm": [None, True],
    "use_parallel_residual": [None, True],
    "do_layer_norm_before": [None, True],
    "no_rope_layers": [None, [1, 0]],
}
ROPE: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "dynamic", "llama3", "yarn"],
    "type": [None, "yarn"],
    "rope_theta": [None, 1e4],
    "factor": [None, 2.0, 8],
    "partial_rotary_factor": [None, 1.0],
    "original_max_position_embeddings": [None, 32],
    "low_freq_factor": [None, 1.0],
    "high_freq_factor": [None, 4.0],
    "beta_fast": [None, 32],
    "beta_slow": [None, 1],
    "truncate": [None, False],
    "alpha": [None, 1000.0],
    "llama_4_scaling_beta": [None, 0.1],
    "attention_factor": [None, 1.0],
    "mscale": [None, 1.0],
    "mscale_all_dim": [None, 1.0],
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([1 << 31, 1 << 63, 10**400, -1, 0, 0.0, -0.5, 1e300, 1e-300, "", "1", "gptq", "default", "é\n"])
    | st.floats(allow_nan=True)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def fields_of(known: dict[str, list[Any]], wrong: bool) -> st.SearchStrategy[dict[str, Any]]:
    strategies = {name: st.sampled_from(good) for name, good in known.items()}
    return st.fixed_dictionaries({}, optional={n: s | anything if wrong else s for n, s in strategies.items()})


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from([*FIELDS]),
    value=anything,
    others=fields_of(FIELDS, wrong=False),
    rope=fields_of(ROPE, wrong=False),
)
def test_a_field_of_any_type_gives_a_model_or_a_sentence(
    name: str, value: Any, others: dict[str, Any], rope: dict[str, Any]
) -> None:
    check(BASE | others | {"rope_parameters": rope} | {name: value})


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from([*ROPE]),
    value=anything,
    rope=fields_of(ROPE, wrong=False),
    spelling=st.sampled_from(["rope_parameters", "rope_scaling"]),
)
def test_a_rotary_field_of_any_type_gives_a_model_or_a_sentence(
    name: str, value: Any, rope: dict[str, Any], spelling: str
) -> None:
    check(BASE | {spelling: rope | {name: value}})


@settings(max_examples=200, deadline=None)
@given(config=fields_of(FIELDS, wrong=True), rope=fields_of(ROPE, wrong=True) | anything)
def test_any_fields_give_a_model_or_a_sentence(config: dict[str, Any], rope: Any) -> None:
    check(BASE | config | {"rope_scaling": rope})


def check(raw: dict[str, Any]) -> None:
    try:
        config = parse_model_config(raw, "own")
    except ConfigError as error:
        check_sentence(str(error))
    else:
        assert isinstance(config, Decoder | Encoder)
        assert all(type(getattr(config, name)) is int for name in ("vocab_size", "hidden_size", "max_model_len"))
        if isinstance(config, Encoder):
            assert all(layer.attention.rope is None or layer.attention.rope.theta > 0 for layer in config.layers)
            assert encoder_tensors(config)
        else:
            assert len(config.windows) == config.num_layers
            assert all(its.rope is None or its.rope.theta > 0 for _, its in config.attentions)
            assert decoder_tensors(config)
        assert 0 < config.max_model_len < 1 << 43


@pytest.mark.parametrize("command", ["serve", "frontend", "scheduler", "worker"])
def test_another_system_is_told_first(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main([command, *(["/nowhere"] if command != "scheduler" else [])]) == 2
    assert capsys.readouterr().err.startswith(f"penstock: `penstock {command}` needs Linux; ")


# --- names and places -------------------------------------------------------------------------------


def named(model: str | Path, **environment: str) -> tuple[Path, tuple[str, ...]]:
    config = located(Config(model=ModelOptions(model=str(model))), environment | {"HF_HUB_OFFLINE": "1"})
    return Path(config.model.model), served_model_names(config)


def download(cache: Path, revision: str = "abc", *, is_main: bool = True) -> Path:
    """What `hf download org/some-model` leaves."""
    cached = cache / "models--org--some-model"
    snapshot = cached / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if is_main:
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(revision)
    return snapshot


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_a_name_of_the_hub_is_looked_up_in_its_cache(tmp_path: Path, variable: str, below: str) -> None:
    snapshot = download(tmp_path / below)
    download(tmp_path / below, "older", is_main=False)
    assert named("org/some-model", **{variable: str(tmp_path)}) == (snapshot, ("org/some-model",))


def test_the_cache_is_in_the_home_folder() -> None:
    assert hub_cache({}) == Path.home() / ".cache/huggingface/hub"


def test_a_name_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`hf download Qwen/Qwen3-0\.6B`") as caught:
        named("Qwen/Qwen3-0.6B", HF_HOME=str(tmp_path))
    assert str(tmp_path / "hub") in str(caught.value)


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download(tmp_path / "hub")
    (tmp_path / "org/some-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert named("org/some-model", HF_HOME=str(tmp_path)) == (Path("org/some-model"), ("org/some-model",))


def test_a_folder_of_the_cache(tmp_path: Path) -> None:
    only = download(tmp_path, is_main=False)
    assert named(tmp_path / "models--org--some-model") == (only, ("org/some-model",))
    download(tmp_path, "second", is_main=False)
    with pytest.raises(ConfigError, match="2 snapshots and no refs/main"):
        named(tmp_path / "models--org--some-model")
    (tmp_path / "models--org--some-model/refs").mkdir()
    (tmp_path / "models--org--some-model/refs/main").write_text("second")
    assert named(tmp_path / "models--org--some-model")[0].name == "second"


def test_an_empty_folder_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "models--org--some-model/snapshots").mkdir(parents=True)
    with pytest.raises(ConfigError, match="`hf download org/some-model`"):
        named("org/some-model", HF_HUB_CACHE=str(tmp_path))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file: name the folder"):
        open_checkpoint(named(tmp_path / "model.safetensors")[0])


@pytest.mark.parametrize("name", ["/nowhere", "a/b/c", "\0", "x" * 5000, "https://example.org/m"])
def test_a_folder_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named(name, HF_HOME=str(tmp_path))
    assert repr(name) in str(caught.value)
