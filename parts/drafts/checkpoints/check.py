"""Finds and checks draft models and heads in milliseconds, before any process starts."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.config.options import Config, ConfigError
from penstock.models.check import ModelTensors
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import parse_model_config
from penstock.models.files.source import Checkpoint, StoredTensor
from penstock.models.finding.located import find_local
from penstock.models.finding.registry import demo_path, open_checkpoint, open_model
from penstock.parts.drafts.checkpoints import eagle, eagle3, medusa, mtp
from penstock.parts.drafts.checkpoints.draft_model import check_draft_model
from penstock.parts.drafts.checkpoints.head import TOKEN_OFFSETS, DraftHead, head_shapes
from penstock.parts.drafts.checkpoints.medusa import Medusa, medusa_shapes
from penstock.parts.drafts.checkpoints.tensors import check_token_ids, head_tensors
from penstock.parts.drafts.options import DraftOptions
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.token_trees import token_tree

DEMO = "demo"
"""The value of `model` that means the demo model's own head."""

Tensors = Mapping[str, StoredTensor]


class FoundHead(NamedTuple):
    """A head that fits its model."""

    head: DraftHead | Medusa
    tensors: ModelTensors


def check_drafter(config: Config, *, with_weights: bool = True, with_tokenizer: bool = True) -> None:
    """Check that the configured draft model or head can work.

    Raises:
        ConfigError: one clear sentence.
    """
    speculative = config.of(DraftOptions).speculative
    if speculative is not None and speculative.method == "draft_model":
        check_draft_model(config, speculative, with_weights=with_weights, with_tokenizer=with_tokenizer)
    if speculative is not None and speculative.method in METHODS and with_weights:
        find_head(config, speculative, parse_model_config(open_model(config).config, config.model.model_impl))


def find_head(config: Config, speculative: SpeculativeConfig, model: ModelConfig) -> FoundHead:
    """Return the configured head.

    Raises:
        ConfigError: there is none, it belongs to another model, or these options rule it out.
    """
    method, parallel = speculative.method, config.parallel
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--speculative-config: method {method} needs hidden states, which {model.architecture} does not hand out "
            "where transformers' code computes it; ngram works with every model"
        )
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--speculative-config: method {method} works on a single worker; with --tensor-parallel-size or "
            "--pipeline-parallel-size use ngram"
        )
    try:
        return METHODS[method](config, model)
    except ConfigError as error:
        its = repr(speculative.model) if speculative.model else "the checkpoint"
        raise ConfigError(f"--speculative-config: {its} cannot be used with {method}: {error}") from None


def open_draft(speculative: SpeculativeConfig) -> Checkpoint:
    """Open the drafter's checkpoint: a folder, the name of a downloaded one, or the demo model's head."""
    if not speculative.model:
        raise ConfigError('name its checkpoint: "model": "FOLDER"')
    if (speculative.method, speculative.model) == ("eagle", DEMO):
        return open_checkpoint(demo_path("head"))
    folder, name, _ = find_local(speculative.model, os.environ)
    if folder is None:
        raise ConfigError(
            f"there is no such folder; `hf download {name or speculative.model}` fetches one of that name"
        )
    return open_checkpoint(folder)


def _read(speculative: SpeculativeConfig, known_as: Callable[[str], str]) -> tuple[Mapping[str, Any], Tensors]:
    checkpoint = open_draft(speculative)
    return checkpoint.config, {known_as(name): tensor for name, tensor in checkpoint.tensors().items()}


def _eagle(speculative: SpeculativeConfig, model: Decoder) -> FoundHead:
    config, stored = _read(speculative, eagle.known_as)
    return _found(speculative, eagle.parse_eagle(config, stored, model), stored, model, eagle.IGNORED)


def _eagle3(speculative: SpeculativeConfig, model: Decoder) -> FoundHead:
    config, stored = _read(speculative, eagle3.known_as)
    return _found(speculative, eagle3.parse_eagle3(config, stored, model), stored, model, eagle3.IGNORED)


def _found(
    speculative: SpeculativeConfig, head: DraftHead, stored: Tensors, model: Decoder, ignored: tuple[str, ...]
) -> FoundHead:
    """Return a head with its tensors; if its outputs do not cover all tokens, there must be a token map."""
    num_outputs = next((num for num in (head.num_picked, head.num_outputs) if num is not None), model.vocab_size)
    integers = {TOKEN_OFFSETS: (num_outputs,)} if head.has_token_map else {}
    if not integers and num_outputs != model.vocab_size:
        raise ConfigError(f"it lacks {TOKEN_OFFSETS}, which says the tokens of its {num_outputs} outputs")
    tensors = head_tensors(speculative.method, stored, head_shapes(head), integers, ignored)
    for name in integers:
        check_token_ids(name, stored[name], model.vocab_size, are_offsets=True)
    return FoundHead(head, tensors)


def _mtp(config: Config, model: Decoder) -> FoundHead:
    begin, head = mtp.prefix(model), mtp.parse_mtp(model)
    found = {name: tensor for name, tensor in open_model(config).tensors().items() if name.startswith(begin)}
    return FoundHead(head, head_tensors("mtp", found, head_shapes(head), {}, mtp.ignored(model)))


def _medusa(speculative: SpeculativeConfig, model: Decoder) -> FoundHead:
    config, stored = _read(speculative, medusa.known_as)
    heads = medusa.parse_medusa(config, stored, model)
    most, token_map = speculative.num_speculative_tokens, heads.token_map
    if tree := speculative.speculative_token_tree:
        depth = max(map(len, token_tree(tree, most, len(heads.heads))))
        if depth > len(heads.heads):
            raise ConfigError(f"it has {len(heads.heads)} heads, too few for a speculative_token_tree of depth {depth}")
    elif most > len(heads.heads):
        raise ConfigError(f"it has {len(heads.heads)} heads, which cannot guess num_speculative_tokens {most}")
    integers = {} if token_map is None else dict(zip(token_map.names, token_map.shapes, strict=True))
    tensors = head_tensors(speculative.method, stored, medusa_shapes(heads), integers)
    for name in integers:
        check_token_ids(name, stored[name], model.vocab_size, are_offsets=False)
    return FoundHead(heads, tensors)


def _of_draft(find: Callable[[SpeculativeConfig, Decoder], FoundHead]) -> Callable[[Config, Decoder], FoundHead]:
    def found(config: Config, model: Decoder) -> FoundHead:
        speculative = config.of(DraftOptions).speculative
        assert speculative is not None
        return find(speculative, model)

    return found


METHODS: Mapping[str, Callable[[Config, Decoder], FoundHead]] = {
    "eagle": _of_draft(_eagle),
    "eagle3": _of_draft(_eagle3),
    "medusa": _of_draft(_medusa),
    "mtp": _mtp,
}
"""Methods whose drafters get hidden states."""
