"""The known families, found by the architecture that config.json names. Nothing else looks at that name."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from penstock.core.checkpoint.families.by_transformers import BY_TRANSFORMERS, TransformersConfig
from penstock.core.checkpoint.families.by_transformers import architectures as transformers_architectures
from penstock.core.checkpoint.families.clockwork import CLOCKWORK
from penstock.core.checkpoint.families.dense import DENSE
from penstock.core.checkpoint.families.ernie import ERNIE
from penstock.core.checkpoint.families.exaone import EXAONE
from penstock.core.checkpoint.families.family import Family, NotDescribed, Shape
from penstock.core.checkpoint.families.gemma import GEMMA
from penstock.core.checkpoint.families.glm import GLM
from penstock.core.checkpoint.families.gpt2 import GPT2
from penstock.core.checkpoint.families.gpt_neox import GPT_NEOX
from penstock.core.checkpoint.families.gpt_oss import GPT_OSS
from penstock.core.checkpoint.families.mixtral import MIXTRAL
from penstock.core.checkpoint.families.nemotron import NEMOTRON
from penstock.core.checkpoint.families.opt import OPT
from penstock.core.checkpoint.families.qwen_moe import QWEN_MOE
from penstock.core.checkpoint.families.seed_oss import SEED_OSS
from penstock.core.checkpoint.families.smollm import SMOLLM
from penstock.core.checkpoint.families.starcoder import STARCODER
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.model_config import ModelConfig, quantized
from penstock.core.config.options import ConfigError, ModelImpl

TEST_MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
"""Test models are known only where this variable is set: a checkpoint cannot ask for one."""

_FAMILIES: dict[str, Family[Any]] = {}
_OTHER_SENSES = ("vision_config", "audio_config", "image_token_id", "image_token_index")


def register(family: Family[Any]) -> None:
    """Make a family's architectures known to this process."""
    _FAMILIES.update(dict.fromkeys(family.architectures, family))


for _family in (
    DENSE,
    ERNIE,
    EXAONE,
    GEMMA,
    GLM,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    MIXTRAL,
    NEMOTRON,
    OPT,
    QWEN_MOE,
    SEED_OSS,
    SMOLLM,
    STARCODER,
):
    register(_family)
ARCHITECTURES = tuple(_FAMILIES)
"""The supported architectures."""


def family_of(config: ModelConfig) -> Family[Any]:
    """The family that parsed this configuration."""
    return BY_TRANSFORMERS if isinstance(config, TransformersConfig) else _known()[config.architecture]


def parse_model_config(raw: Mapping[str, Any], impl: ModelImpl = "auto") -> ModelConfig:
    """Read config.json's object; `impl` says whose code may compute the model.

    Raises:
        ConfigError: for an unsupported architecture or setting, or a field of the wrong type.
    """
    fields = JsonFields("config.json", raw)
    if fields.raw("auto_map"):
        raise ConfigError("this checkpoint brings its own Python code (auto_map), and remote code is never run")
    if quantization := fields.object("quantization_config"):
        raise quantized(quantization.text("quant_method") or "unknown")
    named = fields.texts("architectures") or []
    known = _known()
    if named and named[0] in known and impl != "transformers":
        try:
            return known[named[0]].parse(named[0], fields)  # type: ignore[no-any-return]
        except NotDescribed:
            if impl == "own" or named[0] not in transformers_architectures():
                raise
    if named and impl != "own" and named[0] in transformers_architectures():
        return BY_TRANSFORMERS.parse(named[0], fields)
    raise ConfigError(_why_not(named, fields, impl))


def _why_not(named: list[str], fields: JsonFields, impl: ModelImpl) -> str:
    """Why no code here computes these architectures, and which supported one is the nearest."""
    found = ", ".join(named)[:256] or "none named"
    of_pictures = " (it takes images or sound; only text models are served)"
    hint = of_pictures if any(fields.raw(name) for name in _OTHER_SENSES) else ""
    here = {*ARCHITECTURES} if impl == "own" else {*ARCHITECTURES, *transformers_architectures()}
    near = get_close_matches(named[0], sorted(here), n=1) if named else []
    nearest = f"the nearest that is: {near[0]}" if near else "docs/models.md has a table of those that are"
    with_impl = " with --model-impl own" if impl == "own" else ""
    return f"architecture {found} is not supported{with_impl}{hint}; {nearest}"


def expected_tensors(config: ModelConfig) -> dict[str, Shape] | None:
    """Every tensor that the checkpoint must have, with its shape; None if only the model's builder knows."""
    tensors = family_of(config).tensors
    return None if tensors is None else tensors(config)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor is known to be redundant."""
    return family_of(config).ignores(name, config)


def _known() -> dict[str, Family[Any]]:
    if not os.environ.get(TEST_MODELS_VARIABLE):
        return _FAMILIES
    return _FAMILIES | dict.fromkeys(CLOCKWORK.architectures, CLOCKWORK)
