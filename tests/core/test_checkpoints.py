"""What is said of a checkpoint that cannot be served: one sentence, at once, with what to do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.checkpoint.check import check_checkpoint
from penstock.core.checkpoint.decoder import Decoder
from penstock.core.checkpoint.families.clockwork import CLOCKWORK
from penstock.core.checkpoint.families.registry import ARCHITECTURES, expected_tensors, parse_model_config
from penstock.core.checkpoint.located import hub_cache, located
from penstock.core.checkpoint.registry import open_checkpoint, open_model, served_model_names
from penstock.core.checkpoint.weights import decoder_tensors
from penstock.core.cli.__main__ import main
from penstock.core.config import Config, ConfigError, ModelOptions

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 2,
}
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


def check_sentence(error: ConfigError) -> None:
    text = str(error)
    assert 10 < len(text) < 600
    assert "\n" not in text.replace("é\n", "")
    assert "Traceback" not in text


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
        check_sentence(error)
    else:
        assert isinstance(config, Decoder)
        assert all(type(getattr(config, name)) is int for name in ("vocab_size", "hidden_size", "max_model_len"))
        assert len(config.windows) == config.num_layers
        assert all(layer.mixer.rope is None or layer.mixer.rope.theta > 0 for layer in config.layers)
        assert decoder_tensors(config)
        assert 0 < config.max_model_len < 1 << 43


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A weight file of zeros."""
    header, size = {}, 0
    for name, shape in shapes.items():
        num_bytes = (1 if dtype in ("I8", "U8") else 2) * int.__mul__(*shape) if len(shape) == 2 else 2 * shape[0]
        kind = dtype if len(shape) == 2 else "BF16"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [size, size + num_bytes]}
        size += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that can be served."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(BASE))
    (made / "tokenizer.json").write_text("{}")
    write_weights(made / "model.safetensors", expected_tensors(parse_model_config(BASE)) or {})
    return made


def change(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | fields))


def rename_tensors(folder: Path, new: Callable[[str], str]) -> None:
    shapes = expected_tensors(parse_model_config(BASE)) or {}
    write_weights(folder / "model.safetensors", {new(name): shape for name, shape in shapes.items()})


def replace(folder: Path, name: str, content: str | bytes = b"") -> None:
    """Put a file in the place of weights and config.json."""
    for old in ("config.json", "model.safetensors"):
        (folder / old).unlink()
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n"
UNSUITABLE: dict[str, tuple[Callable[[Path], object], Iterable[str]]] = {
    "another architecture": (
        lambda f: change(f, architectures=["BloomForCausalLM"]),
        ("BloomForCausalLM", "does not let others compute its attention", "not supported"),
    ),
    "an unknown architecture": (
        lambda f: change(f, architectures=["Lama5ForCausalLM"]),
        ("Lama5ForCausalLM is not supported", "the nearest that is: Llama"),
    ),
    "layers with a state": (
        lambda f: change(f, architectures=["Lfm2ForCausalLM"], layer_types=["conv", "full_attention"]),
        ("Lfm2ForCausalLM has layers of kind conv", "only layers that keep keys and values are"),
    ),
    "of pictures": (
        lambda f: change(f, architectures=["Qwen2VLForConditionalGeneration"], vision_config={"depth": 1}),
        ("Qwen2VLForConditionalGeneration", "images", "only text models"),
    ),
    "a model for tests": (
        lambda f: change(f, architectures=list(CLOCKWORK.architectures)),
        (*CLOCKWORK.architectures, "not supported"),
    ),
    "quantized": (
        lambda f: change(f, quantization_config={"quant_method": "awq"}),
        ("quantized (awq)", "not supported yet", "bfloat16"),
    ),
    "quantized by a word": (lambda f: change(f, quantization_config="gptq"), ("quantization_config", "object", "gptq")),
    "quantized in the old way": (
        lambda f: (f / "quantize_config.json").write_text("{}"),
        ("quantized (GPTQ", "quantize_config.json"),
    ),
    "quantized by its tensors": (
        lambda f: rename_tensors(f, lambda name: name.replace("q_proj.weight", "q_proj.qweight")),
        ("quantized", "q_proj.qweight"),
    ),
    "integers": (
        lambda f: write_weights(f / "model.safetensors", expected_tensors(parse_model_config(BASE)) or {}, "I8"),
        ("I8", "quantized weights are not supported"),
    ),
    "text half of a model of pictures": (
        lambda f: rename_tensors(f, lambda name: f"language_model.{name}"),
        ("language_model.", "images"),
    ),
    "an adapter": (lambda f: replace(f, "adapter_config.json", "{}"), ("LoRA adapter", "merge")),
    "an adapter's weights": (
        lambda f: write_weights(f / "model.safetensors", {"model.layers.0.self_attn.q_proj.lora_A.weight": (2, 16)}),
        ("LoRA adapter", "merge"),
    ),
    "GGUF": (lambda f: replace(f, "model-Q4_K_M.gguf"), ("GGUF", "not supported yet", "safetensors")),
    "a pipeline of pictures": (lambda f: replace(f, "model_index.json"), ("diffusers",)),
    "a maker's own format": (lambda f: replace(f, "params.json"), ("own format", "config.json")),
    "nothing": (lambda f: replace(f, "README.md"), ("not a checkpoint folder", "config.json")),
    "pointers": (lambda f: (f / "model.safetensors").write_text(POINTER), ("Git LFS pointer", "git lfs pull")),
    "a pointer as tokenizer": (lambda f: (f / "tokenizer.json").write_text(POINTER), ("tokenizer.json", "Git LFS")),
    "a damaged header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
        ("model.safetensors", "not a readable safetensors file"),
    ),
    "a torn file": (
        lambda f: os.truncate(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1),
        ("model.safetensors", "not a readable safetensors file"),
    ),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ("pickled weights", "safetensors"),
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("no .safetensors files", "download complete")),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ("no tokenizer.json",)),
    "a SentencePiece tokenizer": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        ("tokenizer.model", "save_pretrained", "tokenizer_config.json"),
    ),
    "an end that is no id": (lambda f: change(f, eos_token_id=["a"]), ("eos_token_id", "config.json")),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "not a JSON object")),
}


@pytest.mark.parametrize(("spoil", "words"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_what_cannot_be_served(
    folder: Path, spoil: Callable[[Path], object], words: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_TEST_MODELS")
    config = Config(model=ModelOptions(model=str(folder)))
    check_checkpoint(open_model(located(config)))
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(open_model(located(config)))
    check_sentence(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_refusal_comes_before_torch(folder: Path) -> None:
    """By the command itself: quickly, and from this process alone."""
    change(folder, architectures=["BloomForCausalLM"])
    program = (
        "import sys\nfrom penstock.core.cli.__main__ import main\n"
        f"code = main(['serve', {str(folder)!r}])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 20  # about 0.3 seconds; importing torch takes some
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: architecture BloomForCausalLM is not supported")
    assert len(done.stderr.splitlines()) == 1


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-Q4_K_M.gguf", ("GGUF", "not supported yet", "safetensors")),
        ("model.safetensors", ("is a file", "folder")),
    ],
)
def test_a_file_is_no_folder(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(named(tmp_path / name)[0])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", ["/nowhere", "a/b/c", "\0", "x" * 5000, "https://example.org/m"])
def test_a_folder_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named(name, HF_HOME=str(tmp_path))
    assert repr(name) in str(caught.value)
