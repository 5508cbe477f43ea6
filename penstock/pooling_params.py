"""How texts are pooled, spelled as in vLLM."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `score`, `classify` and `encode`; None: as the server does by default."""

    dimensions: int | None = None  # numbers of an embedding that are kept
    normalize: bool | None = None  # whether an embedding is scaled to length 1
    use_activation: bool | None = None  # False: logits; for embeddings another name of `normalize`
    truncate_prompt_tokens: int | None = None  # tokens that are kept; -1: as many as fit

    def joined(self, what: str, told: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters that were told beside these, with these.

        Raises:
            ValueError: one is set twice, or `what` does not have it.
        """
        found = dict(told)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            if each.name not in told:
                raise ValueError(f"pooling_params: {what} has no {each.name}")
            if told[each.name] is not None:
                raise ValueError(f"{each.name} is set in pooling_params and beside it")
            found[each.name] = value
        return found
