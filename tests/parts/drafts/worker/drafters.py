"""Each drafter, as tests start it for a checkpoint of `make_checkpoint`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from penstock.core.steps.drafts import DraftOutcome
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.parts.drafts.worker.eagle_heads import write_eagle, write_eagle3, write_head
from tests.parts.drafts.worker.medusa_heads import CONFIG, heads


class Drafting(NamedTuple):
    """A drafter."""

    config: Callable[[transformers.PreTrainedModel, Path], dict[str, Any]]
    """From the model and a free folder to what `--speculative-config` says."""
    is_right: bool = True  # now and then: it is not random


def _ngram(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    return {"prompt_lookup_min": 1}


def _suffix(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    return {"suffix_decoding_max_cached_tokens": 4096}


def _draft_model(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    """The model itself, with some noise."""
    draft = type(model)(model.config)
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator) * (weight.dim() > 1)
        for name, weight in model.state_dict().items()
    }
    draft.load_state_dict(noisy)
    draft.save_pretrained(free)
    return {"model": str(free)}


def _eagle(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    write_eagle(free, model)
    return {"model": str(free)}


def _eagle3(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    named = torch.arange(0, model.config.vocab_size, 2)
    write_eagle3(free, model, named, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    return {"model": str(free)}


def _medusa(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    write_head(free, heads(model), CONFIG)
    return {"model": str(free), "num_speculative_tokens": 3}


def _likeliest(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    return _medusa(model, free) | {
        "method": "medusa",
        "num_speculative_tokens": 6,
        "speculative_token_tree": "likeliest",
    }


def _tree(model: transformers.PreTrainedModel, free: Path) -> dict[str, Any]:
    return _likeliest(model, free) | {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (2,), (0, 0, 0)]"}


DRAFTERS: Mapping[str, Drafting] = {
    "ngram": Drafting(_ngram),
    "suffix": Drafting(_suffix),
    "draft_model": Drafting(_draft_model),
    "eagle": Drafting(_eagle, is_right=False),
    "eagle3": Drafting(_eagle3, is_right=False),
    "medusa": Drafting(_medusa, is_right=False),
    "medusa, likeliest": Drafting(_likeliest, is_right=False),
    "medusa, tree": Drafting(_tree, is_right=False),
}


def speculative(name: str, model: transformers.PreTrainedModel, free: Path) -> str:
    """`--speculative-config`."""
    free.mkdir(exist_ok=True)
    return json.dumps({"method": name, "num_speculative_tokens": 4} | DRAFTERS[name].config(model, free))


class Always(FixedLengths):
    """Guesses in every step, and counts what comes of it."""

    num_guessed = num_right = 0

    def note(self, outcome: DraftOutcome) -> None:
        self.num_guessed += sum(outcome.num_guessed)
        self.num_right += sum(max(0, count - 1) for count in outcome.num_tokens)
