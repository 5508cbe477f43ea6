"""Suffix decoding: prompt lookup in the sequence itself, and in the server's recent outputs.

Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024).
"""

import numpy as np

from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Target
from penstock.ipc.messages import StepPlan
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.worker.drafter import Int32Array, Traits
from penstock.parts.drafts.worker.lookup.ngram import NgramDrafter, following, last_ngram_before
from penstock.parts.drafts.worker.lookup.recent_outputs import RecentOutputs, namespace_of
from penstock.parts.drafts.worker.prepared import Prepared

_MIN_SIZE = 2
"""The shortest match in the sequence itself, in tokens."""


class SuffixDrafter(NgramDrafter):
    """Uses the longer match: in the sequence itself, or in outputs of requests with the same cache salt.

    A longer match gives more guesses, but only as far as enough of its places agree. Outputs of requests without
    guesses are not kept.
    """

    traits = Traits(guesses_ahead=True, wants_ended=True)

    def __init__(self, state: RowState, config: SpeculativeConfig) -> None:
        depth = config.suffix_decoding_max_tree_depth
        super().__init__(state, min(_MIN_SIZE, depth), depth)
        self._factor, self._min_share = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        kept = config.suffix_decoding_max_cached_tokens, config.suffix_decoding_max_cached_requests
        self._outputs = RecentOutputs(*kept) if all(kept) else None
        self._namespaces: dict[int, int] = {}  # by row

    def apply(self, plan: StepPlan) -> None:
        """See `Drafter`."""
        for new in plan.new_rows:
            self._namespaces.pop(new.row, None)
            if new.sampling.max_drafts and self._outputs is not None:
                self._namespaces[new.row] = namespace_of(new.cache_salt)

    def ended(self, rows: Int32Array, ends: Int32Array) -> None:
        """See `Drafter`."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            namespace = self._namespaces.pop(row, None)
            if namespace is not None and self._outputs is not None:
                output = self._state.host_tokens(row)[self._state.num_prompt_tokens[row] : end]
                failed = np.flatnonzero(output < 0)
                self._outputs.add(namespace, output[: failed[0]] if failed.shape[0] else output)

    def clear(self) -> None:
        """See `Drafter`. Another rank may have been replaced, so every rank forgets all recent outputs, too."""
        self._namespaces.clear()
        if self._outputs is not None:
            self._outputs.clear()

    def _guess_one(self, row: int, tokens: Int32Array, most: int) -> list[int]:
        text = tokens
        places, size = last_ngram_before(tokens, self._min_tokens, self._max_tokens)
        if self._outputs is not None and (namespace := self._namespaces.get(row)) is not None:
            others = self._outputs.find(namespace, tokens[-self._max_tokens :])
            if others[1] > size:
                text, (places, size) = self._outputs.tokens, others
        most = min(most, int(self._factor * size))
        return following(text, places, most, self._min_share) if most else []


def prepare(config: SpeculativeConfig, target: Target) -> Prepared:
    """There is nothing to load."""
    return Prepared(lambda num_pages, state: SuffixDrafter(state, config))
