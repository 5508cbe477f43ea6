"""Penalties of tokens that have been seen: by repetition, presence and frequency."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class Penalties(Sampler):
    """Repetition counts in prompt and output, presence and frequency in the output."""

    name = "penalties"
    others = ("repetition_penalty", "presence_penalty", "frequency_penalty", "e")
    neutral: ClassVar[Mapping[str, Any]] = {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        found = tuple(given[name] for name in cls.neutral)
        return None if found == tuple(cls.neutral.values()) else found

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        repetition, presence, frequency = values
        tokens: Tensor = draw.token_ids.long()
        seen = z.new_zeros(z.shape[0]).index_fill_(0, tokens, 1.0) > 0
        z = (z / repetition).where(z > 0, z * repetition).where(seen, z)
        outputs = tokens[draw.num_prompt_tokens :]
        counts = z.new_zeros(z.shape[0]).index_add_(0, outputs, z.new_ones(outputs.shape[0]))
        return z - frequency * counts - presence * (counts > 0)
