"""Drafters by their names."""

import importlib
from collections.abc import Callable, Mapping

from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Target
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.worker.lookup.ngram import NgramDrafter
from penstock.parts.drafts.worker.only_forced import OnlyForced
from penstock.parts.drafts.worker.prepared import Prepared

Prepare = Callable[[SpeculativeConfig, Target], Prepared]


def _ngram(config: SpeculativeConfig, target: Target) -> Prepared:
    def make(num_pages: int, state: RowState) -> NgramDrafter:
        return NgramDrafter(state, config.prompt_lookup_min, config.prompt_lookup_max)

    return Prepared(make)


def _only_forced(config: SpeculativeConfig, target: Target) -> Prepared:
    return Prepared(lambda num_pages, state: OnlyForced())


_HEADS = "penstock.parts.drafts.worker.heads.prepare:prepare"  # imported only where it is used
_SUFFIX = "penstock.parts.drafts.worker.lookup.suffix:prepare"
_DRAFT_MODEL = "penstock.parts.drafts.worker.draft_model.prepare:prepare"

DRAFTERS: Mapping[str, Prepare | str] = {
    "ngram": _ngram,
    "suffix": _SUFFIX,
    "grammar": _only_forced,
    "draft_model": _DRAFT_MODEL,
    **dict.fromkeys(("eagle", "eagle3", "medusa", "mtp"), _HEADS),
}
"""The function that prepares each drafter, or "module:function", which is imported when it is needed."""


def prepare_drafter(config: SpeculativeConfig, target: Target) -> Prepared:
    """Load what the drafter needs besides the model.

    Raises:
        ConfigError: the drafter does not suit the model.
    """
    found = DRAFTERS[config.method]
    if isinstance(found, str):
        module, _, function = found.partition(":")
        prepare: Prepare = getattr(importlib.import_module(module), function)
        return prepare(config, target)
    return found(config, target)
