"""Writes the tables of `models.md` from the families, the published models and the tests: none can be forgotten.

python -m docs.models_table            # write them
python -m docs.models_table --check    # exit 1 if they are not what would be written
"""

import importlib
import math
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docs.written_parts import with_parts, write_or_check
from penstock.config.options import ConfigError
from penstock.frontend.parsing.reasoning import REASONING_FORMATS
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS
from penstock.gpu_worker.models.native_program import lacking
from penstock.models import families
from penstock.models.description.decoder import (
    Activation,
    Attention,
    Decoder,
    DenseMLP,
    Experts,
    Layer,
    Router,
    SideBySide,
)
from penstock.models.description.recurrent import GatedDelta, KimiDelta, Mamba1, Mamba2, ShortConv
from penstock.models.families.registry import ARCHITECTURES, POOLED_ARCHITECTURES, parse_model_config
from penstock.models.parsing.by_transformers import TransformersConfig, seeing_types
from penstock.models.parsing.by_transformers import architectures as types_of_architectures
from penstock.models.parsing.family import Family
from penstock.models.parsing.vision.foreign import FOREIGN, NOT_SERVED, TEXT_ONLY
from penstock.models.parsing.vision.towers import TOWERS
from penstock.models.weights.decoder import decoder_tensors
from tests.gpu_worker.families.foreign_eyes import FOREIGN_EYES
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.transformers_checkpoints import MODELS as OF_TRANSFORMERS
from tests.models.published_encoders import ENCODERS
from tests.models.published_models import PUBLISHED, Published
from tests.models.test_published_models import decoder_of, kv_bytes
from tests.parts.encoders.checkpoints import CASES as ENCODER_CASES

PAGE = Path(__file__).parent / "models.md"

_REFUSED = {
    "let others compute its attention": "refused: transformers does not let others compute its attention",
    "which are not supported yet: only layers that": "refused: layers that keep something else than keys and values",
    "without other parts only": "refused: a text part that our own code does not know",
}
"""Parts of what is said when a model is refused, and how the table says it."""

_BEGIN = "<!-- {} is written by docs/models_table.py: run `make docs` after adding a family or a model. -->\n"
_TITLES = {
    "bamba": ("Bamba", ()),
    "cohere": ("Command R, Command A, Aya", ("Command",)),
    "falcon": ("Falcon", ("Falcon-",)),
    "gpt_neo": ("GPT-Neo", ("GPT-Neo",)),
    "gptj": ("GPT-J", ("GPT-J",)),
    "deepseek": ("DeepSeek, Kimi K2", ("DeepSeek", "Kimi", "GLM-4.7-Flash", "GigaChat")),
    "dense": (
        "Llama, Mistral, Qwen",
        (
            "Llama",
            "Mistral",
            "Magistral",
            "Devstral",
            "Qwen2.5",
            "Qwen3",
            "QwQ",
            "Hermes",
            "Functionary",
            "FireFunction",
            "ToolACE",
        ),
    ),
    "ernie": ("ERNIE 4.5", ("ERNIE",)),
    "exaone": ("EXAONE 4", ("EXAONE",)),
    "falcon_h1": ("Falcon-H1", ()),
    "gemma": ("Gemma 1 to 3", ("Gemma 3", "FunctionGemma")),
    "gemma4": ("Gemma 4", ("Gemma 4",)),
    "glm": ("GLM-4", ("GLM",)),
    "gpt2": ("GPT-2", ()),
    "gpt_neox": ("GPT-NeoX, Pythia", ()),
    "gpt_oss": ("gpt-oss", ("gpt-oss",)),
    "granite": ("Granite 3 and 4", ("Granite 3", "Granite 4")),
    "hunyuan": ("Hunyuan", ("Hunyuan",)),
    "kimi_linear": ("Kimi Linear", ()),
    "lfm2": ("LFM 2", ("LFM2",)),
    "jamba": ("Jamba", ("Jamba",)),
    "llama4": ("Llama 4", ("Llama 4",)),
    "mamba": ("Mamba, Falcon Mamba", ()),
    "mamba2": ("Mamba 2", ()),
    "minimax": ("MiniMax M2", ("MiniMax",)),
    "ministral": ("Ministral 3", ("Ministral",)),
    "mixtral": ("Mixtral", ("Mixtral",)),
    "nemotron": ("Nemotron-4, Minitron", ()),
    "nemotron_h": ("Nemotron-H", ("Nemotron",)),
    "olmo": ("OLMo 2 and 3", ("OLMo",)),
    "olmo_hybrid": ("OLMo Hybrid", ()),
    "opt": ("OPT, Galactica", ()),
    "phi": ("Phi-3, Phi-3.5, Phi-4", ("Phi-4",)),
    "phi2": ("Phi-1, Phi-1.5, Phi-2", ()),
    "qwen_delta": ("Qwen3-Next, Qwen3.5", ("Qwen3",)),
    "qwen_moe": ("Qwen mixtures", ("Qwen3",)),
    "seed_oss": ("Seed-OSS", ("Seed-OSS",)),
    "smollm": ("SmolLM3", ("SmolLM3",)),
    "stablelm": ("StableLM", ()),
    "starcoder": ("StarCoder 2", ()),
}
"""A family's file -> its title, and the words by which chat formats name its models."""
_ENCODER_TITLES = {
    "bert": ("BERT, RoBERTa, XLM-R, CamemBERT", ("Bert", "Roberta", "XLMRoberta", "Camembert")),
    "jina": ("jina-embeddings-v3", ("JinaEmbeddingsV3",)),
    "modernbert": ("ModernBERT", ("ModernBert",)),
    "nomic_bert": ("NomicBERT", ("NomicBert",)),
}
"""A file of encoders -> its title, and how its architectures begin."""
OF_NO_FAMILY = {
    "any other", "Apertus", "Apriel 1.5 and 1.6 Thinker", "InternLM 2.5", "InternLM 3", "MiniCPM 5",
    "Muse Glimmer", "Solar Open", "Step 3.5",
}  # fmt: skip
"""Models that chat formats name, and that run through transformers' code or not at all."""
_ACTIVATIONS: dict[Activation, str] = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU (tanh)",
    "relu": "ReLU",
    "relu2": "ReLU²",
    "clamped_swiglu": "clamped SwiGLU",
}


_RECURRENT = {
    Mamba1: "Mamba 1",
    Mamba2: "Mamba 2",
    GatedDelta: "gated delta rule",
    KimiDelta: "gated delta rule with a decay for each number of a key",
    ShortConv: "short convolution",
}


def family_files() -> dict[str, tuple[str, ...]]:
    """The architectures of each family's file."""
    found = {}
    for file in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        names = _architectures(importlib.import_module(file.name))
        if names and file.name.rpartition(".")[2] != "registry":
            found[file.name.rpartition(".")[2]] = names
    assert sorted(name for names in found.values() for name in names) == sorted(ARCHITECTURES)
    return dict(sorted(found.items(), key=lambda item: _TITLES[item[0]][0].lower()))


def _architectures(module: ModuleType) -> tuple[str, ...]:
    members: Iterable[Any] = vars(module).values()
    names = (name for member in members if isinstance(member, Family) for name in member.architectures)
    return tuple(name for name in names if name in ARCHITECTURES)


def blocks(decoder: Decoder) -> Iterator[str]:
    """What a decoder is made of."""
    layers = tuple(dict.fromkeys(decoder.layers))
    for layer in layers:
        yield from _norms(layer)
    for layer in layers:
        yield from _mixer(layer)
    if {its.rope is None for _, its in decoder.attentions} == {True, False}:
        yield "layers without positions"
    for layer in layers:
        if layer.mlp is not None:
            yield from _mlp(layer.mlp)
        if layer.beside_mlp is not None:
            yield from _mlp(layer.beside_mlp.experts)
            yield "experts beside the MLP"
    if any(layer.residual_scale != 1.0 for layer in layers):
        yield "residual multiplier"
    if any(layer.has_output_scale for layer in layers):
        yield "scaled layers"
    if decoder.layer_inputs is not None:
        yield "a vector for each layer and token"
    if decoder.positions is not None:
        yield "learned positions"
    if decoder.embedding_scale != 1.0:
        yield "embedding multiplier"
    if decoder.logit_scale != 1.0:
        yield "logit multiplier"
    if decoder.logit_softcap:
        yield "softcap of logits"
    if decoder.head_bias:
        yield "bias of logits"


def _norms(layer: Layer) -> Iterator[str]:
    norm = layer.mixer_norm or layer.post_mixer_norm
    if norm is not None:
        kind = "RMSNorm" if norm.kind == "rms" else "LayerNorm" if norm.has_bias else "LayerNorm without bias"
        places = (
            "before" if layer.post_mixer_norm is None else "after" if layer.mixer_norm is None else "before and after"
        )
        yield f"{kind}{' (1 + w)' if norm.offset else ''} {places} blocks"
    if layer.is_parallel:
        yield "parallel blocks" if layer.mlp_norm is None else "parallel blocks with a norm each"


def _mixer(layer: Layer) -> Iterator[str]:
    if isinstance(layer.mixer, SideBySide):
        yield "attention beside a recurrent mixer"
    if layer.recurrent is not None:
        yield _RECURRENT[type(layer.recurrent)]
    mixer = layer.attention
    if mixer is None:
        return
    if not isinstance(mixer, Attention):
        yield "latent attention"
        if mixer.indexer is not None:
            yield "an indexer that chooses positions"
    else:
        if mixer.has_output_gate:
            yield "attention with a gate"
        if mixer.q_norm is not None:
            spans = {"head": "by head", "each head": "with weights for each head", "all": "over all heads"}
            kind = "RMSNorm" if mixer.q_norm.kind == "rms" else "LayerNorm"
            yield f"{kind} of q and k {spans[mixer.norms_span]}{' after rotation' * mixer.norms_follow_rope}"
        if mixer.v_norm_eps is not None:
            yield "RMSNorm of v by head"
        if mixer.values_are_keys:
            yield "keys as values"
        if mixer.shares_kv_of is not None:
            yield "keys and values of another layer"
        if mixer.qkv_bias or mixer.o_bias:
            yield "biases of q, k, v and o" if mixer.o_bias else "biases of q, k and v"
        if mixer.window is not None:
            yield "windows"
        if mixer.softcap:
            yield "softcap of scores"
        if mixer.has_sinks:
            yield "sinks"
        if mixer.query_growth is not None:
            yield "queries that grow"
    if mixer.rope is not None:
        head_dim = mixer.head_dim if isinstance(mixer, Attention) else mixer.rope_dim
        part = "a part of heads" if mixer.rope.dim < head_dim else ""
        pairs = "pairs of neighbours" if mixer.rope.is_interleaved else "pairs of halves" * bool(mixer.rope.spread_over)
        scaling = mixer.rope.kind if mixer.rope.kind != "default" else ""
        details = ", ".join(filter(None, (scaling, part, pairs)))
        yield f"rotary ({details})" if details else "rotary"


def _mlp(mlp: DenseMLP | Experts) -> Iterator[str]:
    name = _ACTIVATIONS[mlp.activation]
    if isinstance(mlp, DenseMLP):
        yield f"{'gated ' * mlp.is_gated}{name} MLP{' with biases' * mlp.has_bias}"
        return
    yield f"{'gated ' * mlp.is_gated}{name} experts{' with biases' * mlp.has_bias}, {_router(mlp.router)}"
    if mlp.shared is not None:
        yield "gated shared expert" if mlp.shared_is_gated else "shared expert"


def _router(router: Router) -> str:
    kinds = {
        "softmax": "softmax, then the best",
        "sigmoid": "sigmoid, then the best",
        "top_softmax": "the best, then softmax",
    }
    parts = (
        kinds[router.kind],
        "renormalised" * router.renormalize,
        "corrected choice" * router.has_correction,
        "by groups" * (router.num_groups > 1),
        "scaled" * (router.scale != 1.0),
        "scaled by expert" * router.has_expert_scales,
        "multiplying inputs" * router.multiplies_input,
    )
    return "router: " + ", ".join(filter(None, parts))


def family_tables() -> str:
    """Each family's models, chat formats and tests, then its blocks, backends and lines."""
    models = [
        "| family | architectures | published models | tool calls, reasoning | tested options |",
        "|" + " --- |" * 5,
    ]
    parts = ["| family | blocks | backends | lines |", "|" + " --- |" * 4]
    for file, architectures in family_files().items():
        title, words = _TITLES[file]
        published = [model for model in PUBLISHED if model.architecture in architectures]
        decoders = [decoder_of(model) for model in published]
        models.append(
            _row(
                title,
                _codes(architectures),
                ", ".join(_short(m) for m in published),
                _formats(words),
                _tested(architectures),
            )
        )
        unique = dict.fromkeys(block for decoder in decoders for block in blocks(decoder))
        lacks = dict.fromkeys(filter(None, map(lacking, decoders)))
        number = len(Path(families.__path__[0], f"{file}.py").read_text().splitlines())
        backends = f"triton, torch (native lacks {', '.join(lacks)})" if lacks else "triton, torch, native"
        parts.append(_row(title, "; ".join(unique), backends, f"`{file}.py`: {number}"))
    return "\n".join(models) + "\n\n" + "\n".join(parts) + "\n"


def _short(model: Published) -> str:
    return model.name.partition("/")[2] or model.name


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def without_a_row() -> set[str]:
    """The models of chat formats that no family's row takes for its own."""
    words = [word for _, of_family in _TITLES.values() for word in of_family]
    named = {name for form in TOOL_FORMATS.values() for name in form.models}
    named |= {name for form in REASONING_FORMATS.values() for name in form.models}
    return {name for name in named if not _is_among([name], tuple(words))}


def _formats(words: tuple[str, ...]) -> str:
    tools = [name for name, form in TOOL_FORMATS.items() if _is_among(form.models, words)]
    thoughts = [name for name, form in REASONING_FORMATS.items() if _is_among(form.models, words)]
    return ", ".join(filter(None, (_codes(sorted(tools)), f"thinks: {_codes(sorted(thoughts))}" if thoughts else "")))


def _is_among(models: Iterable[str], words: tuple[str, ...]) -> bool:
    return any(word in model for model in models for word in words)


def _tested(architectures: Iterable[str]) -> str:
    types = [types_of_architectures().get(name) for name in architectures]  # text parts have none of their own
    return _codes(name for name, case in CASES.items() if case.model_type in types)


def published_table() -> str:
    """Each published model with its parameters and KV."""
    rows = [
        "| model | parameters | of these active | KV of a token, bf16 | state of a row |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for model in sorted(PUBLISHED, key=lambda model: model.name.lower()):
        decoder = decoder_of(model)
        count = sum(math.prod(shape) for shape in decoder_tensors(decoder).values())
        state = decoder.state_bytes / 2**20
        of_row = f"{state:.3g} MiB" if state else ""
        rows.append(_row(model.name, _billions(count), model.active, f"{kv_bytes(decoder) / 1024:g} KiB", of_row))
    return "\n".join(rows) + "\n"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count < 1e11 else f"{count / 1e9:.0f}B"


def types_by_transformers() -> str:
    """The types whose architectures run through transformers' code in the tests."""
    return _codes(OF_TRANSFORMERS) + "\n"


def encoder_table() -> str:
    """Each family of encoders, its published models and tested options."""
    rows = ["| family | architectures | published models | tested options |", "|" + " --- |" * 4]
    for file, (title, starts) in _ENCODER_TITLES.items():
        names = [name for name in POOLED_ARCHITECTURES if name.startswith(starts)]
        published = [model.name.partition("/")[2] for model in ENCODERS if model.architecture in names]
        tested = [name for name, case in ENCODER_CASES.items() if case.model in names]
        assert Path(families.__path__[0], f"{file}.py").exists()
        rows.append(_row(f"{title} (`{file}.py`)", _codes(names), ", ".join(published), "; ".join(tested)))
    return "\n".join(rows) + "\n"


def causal_types() -> dict[str, list[str]]:
    """What becomes of each causal language model of the installed transformers: types by what is said of them.

    It is said of the configuration that its class makes by default.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    transformers.logging.set_verbosity_error()
    found: dict[str, list[str]] = {}
    for architecture, kind in types_of_architectures().items():
        said = "own code"
        if architecture not in ARCHITECTURES:
            try:
                fields = transformers.CONFIG_MAPPING[kind]().to_dict() | {"architectures": [architecture]}
                if isinstance(parse_model_config(fields), TransformersConfig):
                    said = "through transformers" + (", tested" if kind in OF_TRANSFORMERS else "")
            except StrictDataclassError:  # a part of another model, which has no configuration of its own
                continue
            except ConfigError as error:  # what else it says is of a family's own settings, which a checkpoint has
                said = next((what for part, what in _REFUSED.items() if part in str(error)), said)
        found.setdefault(said, []).append(kind)
    return found


def causal_table() -> str:
    """The causal types by what becomes of them, with their numbers."""
    rows = ["| what becomes of it | types | number |", "| --- | --- | --- |"]
    for said, kinds in sorted(causal_types().items()):
        rows.append(_row(said, _codes(sorted(kinds)), str(len(kinds))))
    return "\n".join(rows) + "\n"


_OTHERS = {
    "pp_chart2table": "text only: its processor writes no places for images into prompts",
    "shieldgemma2": "refused: it sorts images into classes",
}
"""Types that the lists of architectures do not tell apart from others."""


def seeing_types_table() -> str:
    """What becomes of each type of the installed transformers that takes images and texts."""
    found: dict[str, list[str]] = {"own": [], "transformers": []}
    alone: dict[str, list[str]] = {}
    for kind, architecture in sorted(seeing_types().items()):
        if kind in _OTHERS:
            alone.setdefault(_OTHERS[kind], []).append(kind)
        elif architecture in TOWERS:
            found["own"].append(kind)
        elif architecture in FOREIGN:
            found["transformers"].append(kind)
            assert any((eyes.kind or name) == kind for name, eyes in FOREIGN_EYES.items()), f"{kind} is not tested"
        elif architecture in TEXT_ONLY:
            alone.setdefault(f"text only: {TEXT_ONLY[architecture]}", []).append(kind)
        else:
            why = NOT_SERVED.get(architecture, "its text part is of a kind that is not served")
            alone.setdefault(f"refused: {why}", []).append(kind)
    rows = ["| images | types | |", "| --- | --- | --- |"]
    rows.append(_row("by our own towers", _codes(found["own"]), str(len(found["own"]))))
    rows.append(_row("by towers of `transformers`", _codes(found["transformers"]), str(len(found["transformers"]))))
    rows += (_row(why, _codes(kinds), str(len(kinds))) for why, kinds in sorted(alone.items(), reverse=True))
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with what belongs there."""
    parts = {
        "The table of families": family_tables(),
        "The table of encoders": encoder_table(),
        "The table of published models": published_table(),
        "The list of types": types_by_transformers(),
        "The table of causal types": causal_table(),
        "The table of types that see": seeing_types_table(),
    }
    return with_parts(PAGE, {_BEGIN.format(name): written for name, written in parts.items()})


def main() -> int:
    """Write the tables, or check them; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
