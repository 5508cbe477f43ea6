"""What quantization_config says: which matrices are quantized and how, and what is refused before anything starts."""

from typing import Any

import pytest

from penstock.config.options import ConfigError
from penstock.models.formats.awq import AWQMatrix
from penstock.models.formats.bitsandbytes import BlocksMatrix, Int8Matrix
from penstock.models.formats.compressed_tensors import Floats, Integers, Packed, Scales
from penstock.models.formats.format import Inputs, MatrixFormat, Quantization
from penstock.models.formats.fp8 import FP8Matrix
from penstock.models.formats.gptq import GPTQMatrix
from penstock.models.formats.mxfp4 import MXFP4Matrix
from penstock.models.formats.registry import quantization_of
from penstock.models.parsing.json_fields import JsonFields

UP = "model.layers.0.mlp.up_proj.weight"
HEAD = "lm_head.weight"
FP8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def quantization(method: str, **fields: Any) -> Quantization:
    found = quantization_of(JsonFields("config.json", {"quantization_config": {"quant_method": method, **fields}}))
    assert found is not None
    return found


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any) -> Quantization:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return quantization("compressed-tensors", config_groups={"group_0": group}, ignore=["lm_head"], **fields)


@pytest.mark.parametrize(
    ("found", "format"),
    [
        (quantization("gptq", bits=4), GPTQMatrix(4, 128, 1, False)),
        (quantization("gptq", bits=8, group_size=-1, desc_act=True), GPTQMatrix(8, None, 1, True)),
        (quantization("gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"), GPTQMatrix(4, 32, 2, False)),
        (quantization("awq", bits=4, group_size=64, version="gemm"), AWQMatrix(64)),
        (quantization("awq", w_bit=4, q_group_size=128, version="GEMM", zero_point=True), AWQMatrix(128)),
        (
            quantization("fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128]),
            FP8Matrix((128, 128), Inputs("fp8_e4m3", False, 128)),
        ),
        (
            quantization("fp8", activation_scheme="static", ignored_layers=["lm_head"]),
            FP8Matrix(None, Inputs("fp8_e4m3", True)),
        ),
        (
            quantization("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
            BlocksMatrix("nf4", is_nested=True),
        ),
        (quantization("bitsandbytes", _load_in_8bit=True, load_in_8bit=True), Int8Matrix()),
        (compressed(INT4, format="pack-quantized"), Packed(4, Scales(1, 128), True, False, None)),
        (
            compressed({**INT4, "symmetric": False, "actorder": "group"}, format="pack-quantized"),
            Packed(4, Scales(1, 128), False, True, None),
        ),
        (
            compressed(
                {"num_bits": 8, "strategy": "channel"},
                {"num_bits": 8, "strategy": "token", "dynamic": True},
                format="int-quantized",
            ),
            Integers(8, Scales(1, None), True, Inputs("int8", False)),
        ),
        (
            compressed({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}, format="float-quantized"),
            Floats(Scales(None, None), Inputs("fp8_e4m3", True)),
        ),
        (
            compressed(
                {**FP8, "strategy": "block", "block_structure": "128x128"},
                {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
                format="naive-quantized",
            ),
            Floats(Scales(128, 128), Inputs("fp8_e4m3", False, 128)),
        ),
    ],
)
def test_matrices_but_the_head_have_the_format(found: Quantization, format: MatrixFormat) -> None:
    assert found.format_of(UP) == format
    assert found.format_of(HEAD) is None


def test_experts_of_mxfp4() -> None:
    found = quantization("mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    assert found.format_of("model.layers.0.mlp.experts.gate_up_proj") == MXFP4Matrix()
    assert found.format_of("model.layers.0.self_attn.q_proj.weight") is None


@pytest.mark.parametrize(
    ("kept", "name", "is_kept"),
    [
        ("gate", "model.layers.0.mlp.gate.weight", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj.weight", False),
        ("model.layers.1", "model.layers.1.mlp.gate.weight", True),
        ("model.layers.1", "model.layers.11.mlp.gate.weight", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj.weight", True),
    ],
)
def test_modules_that_are_kept(kept: str, name: str, is_kept: bool) -> None:
    found = quantization("fp8", weight_block_size=[128, 128], modules_to_not_convert=[kept])
    assert (found.format_of(name) is None) == is_kept


def test_gptq_modules_with_rules_of_their_own() -> None:
    rules = {"+:.*\\.up_proj": {"bits": 8, "group_size": 32}, "-:.*\\.down_proj": {}, ".*\\.o_proj": {"desc_act": True}}
    found = quantization("gptq", bits=4, lm_head=True, dynamic=rules)
    assert found.format_of(UP) == GPTQMatrix(8, 32, 1, False)
    assert found.format_of("model.layers.0.mlp.down_proj.weight") is None
    assert found.format_of("model.layers.0.self_attn.o_proj.weight") == GPTQMatrix(4, 128, 1, True)
    assert found.format_of(HEAD) == GPTQMatrix(4, 128, 1, False)


def test_groups_of_compressed_tensors_by_name_pattern_and_class() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4},
        "group_1": {
            "targets": [r"re:.*\.mlp\..*"],
            "weights": {**FP8, "strategy": "channel"},
            "format": "naive-quantized",
        },
        "group_2": {"targets": ["model.layers.0.mlp.up_proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
    }
    found = quantization(
        "compressed-tensors", format="mixed-precision", config_groups=groups, ignore=["lm_head", r"re:.*self_attn\.v"]
    )
    assert found.format_of("model.layers.0.self_attn.q_proj.weight") == Packed(4, Scales(1, 128), True, False, None)
    assert found.format_of("model.layers.0.self_attn.v_proj.weight") is None
    assert found.format_of("model.layers.0.mlp.gate_proj.weight") == Floats(Scales(1, None), None)
    assert found.format_of(UP) == Packed(8, Scales(1, None), True, False, None)
    assert found.name == "compressed-tensors W4A16, FP8 W8A16, W8A16"


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("gptq", {"bits": 5}, ("GPTQ of 5 bits", "2, 3, 4 or 8")),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, ("GPTQ in the layout marlin", "gptq_v2")),
        ("gptq", {"bits": 4, "is_marlin_format": True}, ("marlin",)),
        ("awq", {"bits": 4, "version": "gemv"}, ("AWQ in the layout gemv", "gemm")),
        ("awq", {"bits": 4, "backend": "llm-awq"}, ("llm-awq", "gemm")),
        ("awq", {"bits": 8}, ("AWQ of 8 bits", "4 bits")),
        ("fp8", {"fmt": "e5m2"}, ("e5m2", "e4m3")),
        ("fp8", {"expert_dtype": "fp4"}, ("fp4",)),
        ("bitsandbytes", {}, ("load_in_4bit", "nf4")),
        ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, ("bfloat16", "uint8")),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, ("nvfp4-pack-quantized", "pack-quantized")),
        ("compressed-tensors", {"format": "marlin-24"}, ("marlin-24", "pack-quantized")),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparse", "pack-quantized")),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, ("transform_config",)),
        ("compressed-tensors", {"format": "int-quantized", "config_groups": {}}, ("without quantized weights",)),
        ("quark", {}, ("quark", "gptq", "compressed-tensors")),
    ],
)
def test_other_variants_are_refused_by_name(method: str, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        quantization(method, **fields)
    assert all(word in str(raised.value) for word in (*words, "not supported"))


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("gptq", {"bits": 4, "group_size": 0}),
        ("gptq", {"bits": "4"}),
        ("gptq", {"bits": 4, "dynamic": {"+:(": {}}}),
        ("awq", {"bits": 4, "group_size": 0}),
        ("fp8", {"weight_block_size": [128]}),
        ("fp8", {"modules_to_not_convert": ["("]}),
        ("compressed-tensors", {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}}}),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {**FP8, "strategy": "block"}}}}),
    ],
)
def test_nonsense_is_refused_in_a_sentence(method: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="config"):
        quantization(method, **fields)
