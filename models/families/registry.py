"""The known families, by the architecture that config.json names. No other code looks at that name."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from penstock.config.options import ConfigError, ModelImpl
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.bamba import BAMBA
from penstock.models.families.bert import BERT, ROBERTA
from penstock.models.families.cohere import COHERE
from penstock.models.families.deepseek import DEEPSEEK
from penstock.models.families.dense import DENSE, DENSE_POOLED
from penstock.models.families.ernie import ERNIE
from penstock.models.families.exaone import EXAONE
from penstock.models.families.falcon import FALCON
from penstock.models.families.falcon_h1 import FALCON_H1
from penstock.models.families.gemma import GEMMA
from penstock.models.families.gemma4 import GEMMA4
from penstock.models.families.glm import GLM, GLM_MIXTURE
from penstock.models.families.gpt2 import GPT2
from penstock.models.families.gpt_neo import GPT_NEO
from penstock.models.families.gpt_neox import GPT_NEOX
from penstock.models.families.gpt_oss import GPT_OSS
from penstock.models.families.gptj import GPT_J
from penstock.models.families.granite import GRANITE
from penstock.models.families.hunyuan import HUNYUAN
from penstock.models.families.jamba import JAMBA
from penstock.models.families.jina import JINA_V3
from penstock.models.families.kimi_linear import KIMI_LINEAR
from penstock.models.families.lfm2 import LFM2
from penstock.models.families.llama4 import LLAMA4
from penstock.models.families.mamba import MAMBA
from penstock.models.families.mamba2 import MAMBA2
from penstock.models.families.minimax import MINIMAX
from penstock.models.families.ministral import MINISTRAL
from penstock.models.families.mixtral import MIXTRAL
from penstock.models.families.modernbert import MODERN_BERT
from penstock.models.families.nemotron import NEMOTRON
from penstock.models.families.nemotron_h import NEMOTRON_H
from penstock.models.families.nomic_bert import NOMIC_BERT
from penstock.models.families.olmo import OLMO
from penstock.models.families.olmo_hybrid import OLMO_HYBRID
from penstock.models.families.opt import OPT
from penstock.models.families.phi import PHI3
from penstock.models.families.phi2 import PHI
from penstock.models.families.qwen_delta import QWEN_DELTA
from penstock.models.families.qwen_moe import QWEN_MOE
from penstock.models.families.seed_oss import SEED_OSS
from penstock.models.families.smollm import SMOLLM
from penstock.models.families.stablelm import STABLELM
from penstock.models.families.starcoder import STARCODER
from penstock.models.formats.format import unsupported
from penstock.models.formats.kv_scales import kv_scale_type
from penstock.models.formats.registry import quantization_of
from penstock.models.parsing.by_transformers import BY_TRANSFORMERS, TransformersConfig, UnsupportedError
from penstock.models.parsing.by_transformers import architectures as transformers_architectures
from penstock.models.parsing.family import Family, NotDescribed, Shape
from penstock.models.parsing.json_fields import JsonFields, shown
from penstock.models.parsing.nearest import nearest, why_not
from penstock.models.parsing.text_part import seeing_architecture, text_part
from penstock.models.parsing.vision.foreign import FOREIGN
from penstock.models.parsing.vision.towers import parse_vision
from penstock.models.vision.foreign import ForeignVision

TEST_MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
"""Names a module whose `FAMILIES` are known beside ours. It is for tests, and no checkpoint can set it."""

_FAMILIES: dict[str, Family[Any]] = {}


def register(family: Family[Any]) -> None:
    """Make a family's architectures known to this process."""
    _FAMILIES.update(dict.fromkeys(family.architectures, family))


for _family in (
    DENSE,
    BAMBA,
    COHERE,
    DEEPSEEK,
    ERNIE,
    EXAONE,
    FALCON_H1,
    GEMMA,
    GEMMA4,
    GLM,
    GLM_MIXTURE,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    HUNYUAN,
    JAMBA,
    KIMI_LINEAR,
    LFM2,
    LLAMA4,
    MAMBA,
    MAMBA2,
    MINIMAX,
    MINISTRAL,
    MIXTRAL,
    NEMOTRON,
    NEMOTRON_H,
    OLMO,
    OLMO_HYBRID,
    OPT,
    PHI,
    PHI3,
    QWEN_DELTA,
    QWEN_MOE,
    SEED_OSS,
    SMOLLM,
    STABLELM,
    STARCODER,
    FALCON,
    GPT_J,
    GPT_NEO,
):
    register(_family)
ARCHITECTURES = tuple(_FAMILIES)
"""The supported architectures that generate text."""
for _pooled in (BERT, DENSE_POOLED, JINA_V3, MODERN_BERT, NOMIC_BERT, ROBERTA):
    register(_pooled)
POOLED_ARCHITECTURES = tuple(name for name in _FAMILIES if name not in ARCHITECTURES)
"""Those that turn texts into vectors or classes only."""


def family_of(config: ModelConfig) -> Family[Any]:
    """Return the family that parsed this configuration."""
    return BY_TRANSFORMERS if isinstance(config, TransformersConfig) else _known()[config.architecture]


def parse_model_config(raw: Mapping[str, Any], impl: ModelImpl = "auto") -> ModelConfig:
    """Parse the object of config.json; `impl` says whose code may compute the model.

    Raises:
        ConfigError: for an unsupported architecture or setting, or a field of the wrong type.
    """
    fields = JsonFields("config.json", raw)
    named = fields.texts("architectures") or []
    known = _known()
    if (seeing := seeing_architecture(raw)) is not None:
        named = [seeing]
    # Checkpoints older than transformers' support of their architecture still bring their own code; it is ignored.
    is_known = named and (seeing is not None or named[0] in known or named[0] in transformers_architectures())
    if fields.raw("auto_map") and not is_known:
        raise ConfigError(
            f"this checkpoint brings its own Python code for {shown(named[0]) if named else 'its model'} (config.json: "
            "auto_map), and remote code is never run; a later release of the model may have the architecture under a "
            "name that transformers knows"
        )
    part = text_part(named[0], fields, known) if named else None
    of_text = fields if part is None else part[1]
    stored: dict[str, Any] = {"quantization": quantization_of(of_text), "kv_scales": kv_scale_type(of_text)}
    if part is not None:
        if impl == "transformers":
            raise ConfigError(f"the text part of {named[0]} is served by our own code only: --model-impl auto does it")
        config: ModelConfig = known[part[0]].parse(*part)
        if isinstance(config, Decoder):
            config = replace(config, vision=parse_vision(named[0], fields, config))
            if isinstance(config.vision, ForeignVision) and not FOREIGN[named[0]].changes_logits:
                config = replace(config, logit_scale=1.0, logit_softcap=0.0)
        return replace(config, text_part_of=named[0], **stored)
    lacks = ""
    if named and named[0] in known and impl != "transformers":
        try:
            config = known[named[0]].parse(named[0], fields)
            return replace(config, **stored)
        except NotDescribed as error:
            if named[0] not in transformers_architectures():
                raise
            if impl == "own":
                raise ConfigError(f"{error}; without --model-impl own, transformers' code may compute it") from None
            lacks = f"{error}; "
    if named and impl != "own" and named[0] in transformers_architectures():
        if (quantization := stored["quantization"]) is not None:
            raise unsupported(f"{quantization.name}, in {named[0]}, which transformers' code computes", "floats there")
        try:
            return BY_TRANSFORMERS.parse(named[0], fields)
        except UnsupportedError as error:
            raise ConfigError(f"{lacks}{error}{nearest(named[0], fields, ARCHITECTURES, _serves)}") from None
    raise ConfigError(why_not(named, fields, ARCHITECTURES, impl, _serves))


def _serves(architecture: str, fields: JsonFields) -> bool:
    """Whether a config.json could be served if it named this architecture."""
    families = [family for family in (_FAMILIES.get(architecture),) if family is not None]
    for family in [*families, BY_TRANSFORMERS] if architecture in transformers_architectures() else families:
        try:
            family.parse(architecture, fields)
        except ConfigError:
            continue
        return True
    return False


def expected_tensors(config: ModelConfig) -> dict[str, Shape] | None:
    """Return every tensor that the checkpoint must have, with its shape; None if only the model's builder knows."""
    tensors = family_of(config).tensors
    found = None if tensors is None else tensors(config)
    if found and isinstance(config, Decoder) and config.vision is not None:
        found = found | config.vision.tensors
    return found


def expected_matrices(config: ModelConfig) -> dict[str, Shape]:
    """Return the matrices that may be quantized, with shapes [..., outputs, inputs], however they are stored."""
    return family_of(config).matrices(config)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor is known to be redundant."""
    return family_of(config).ignores(name, config)


def _known() -> dict[str, Family[Any]]:
    module = os.environ.get(TEST_MODELS_VARIABLE)
    if not module:
        return _FAMILIES
    families: Sequence[Family[Any]] = import_module(module).FAMILIES
    return _FAMILIES | {name: family for family in families for name in family.architectures}
