"""A field that config.json lacks, or has as null, means what transformers takes it to mean."""

import json
from typing import Any

import pytest
import transformers

from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import ARCHITECTURES, parse_model_config
from penstock.models.parsing.by_transformers import architectures

COMPLETED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["full_attention"] * 32},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
"""What transformers' default configurations need to be those of a model."""
REQUIRED = {
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}
MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def completed(architecture: str, **fields: Any) -> dict[str, Any]:
    """What config.json says if these fields are given, and transformers decides about the others."""
    made = transformers.CONFIG_MAPPING[architectures()[architecture]]
    said: dict[str, Any] = json.loads(made(**COMPLETED.get(architecture, {}), **fields).to_json_string(use_diff=False))
    return said | {"architectures": [architecture]}


def parse(raw: dict[str, Any]) -> Decoder:
    config = parse_model_config(raw, "own")
    assert isinstance(config, Decoder)
    return config


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name in architectures()])
def test_fields_that_are_absent_or_null(architecture: str) -> None:
    raw = completed(architecture)
    wanted = parse(raw)
    for name in raw.keys() - COMPLETED.get(architecture, {}).keys():
        rest = {key: value for key, value in raw.items() if key != name}
        if name in REQUIRED:
            continue
        assert parse(rest) == wanted, name
        if name in MAY_BE_NULL:
            try:
                resolved = completed(architecture, **{name: None})
            except Exception:  # transformers' configurations check themselves, each in its own way
                continue
            assert parse(rest | {name: None}) == parse(resolved), f"{name}: null"
