"""Rotary settings of a config.json.

Both spellings are understood: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.parsing.json_fields import JsonFields

_MAX_ROPE_FACTOR = 4096.0

RopeKind = Literal["default", "proportional", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "proportional", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How positions rotate q and k. Fields that a kind does not use keep their defaults."""

    kind: RopeKind
    dim: int  # how many numbers of a head are rotated, from the first on
    theta: float
    original_max_len: int  # trained length, on which the scaling of llama3, yarn, longrope and dynamic is based
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope, one for each pair: up to the trained length
    long_factors: tuple[float, ...] = ()  # longrope: beyond it
    attention_factor: float = 1.0  # multiplies cosines and sines; resolved from mscale for yarn
    is_interleaved: bool = False  # in the checkpoint a pair is two neighbours, instead of one from each half
    spread_over: int = 0
    """The head's size, if only some pairs of its halves are rotated, with the frequencies of a fully rotated head
    (Gemma 4's "proportional"); 0: the rotated numbers are treated as a head of their own."""
    sections: tuple[int, ...] = ()
    """How many pairs rotate by a position's time, row and column: M-RoPE (Qwen2-VL). In text all three equal the
    position, so it is ordinary rotation. Empty: positions have no parts."""
    sections_alternate: bool = False  # pairs of the three kinds alternate while each has some left (Qwen3-VL)

    @property
    def section_of_pair(self) -> tuple[int, ...]:
        """Which of the three kinds each pair has."""
        time, row, column = self.sections
        if not self.sections_alternate:
            return (0,) * time + (1,) * row + (2,) * column
        ends = {1: 3 * row, 2: 3 * column}
        return tuple(pair % 3 if pair < ends.get(pair % 3, 0) else 0 for pair in range(self.dim // 2))

    @property
    def depends_on_length(self) -> bool:
        """Whether sequences beyond the trained length are rotated differently; the prompt's length decides here."""
        return self.kind in ("dynamic", "longrope")


def rope_settings(fields: JsonFields, layer_type: str = "") -> JsonFields:
    """Return the object with the rotary settings, for this type of layers if types differ; it may be empty."""
    settings = fields.object("rope_scaling") or fields.object("rope_parameters") or JsonFields("config.json", {})
    if not settings.has_objects():
        return settings
    if not layer_type:
        raise ConfigError("config.json: rotary settings per layer type are not supported for this architecture")
    return settings.object(layer_type) or JsonFields("config.json", {})


def parse_rope(
    fields: JsonFields,
    trained_len: int,
    head_dim: int,
    *,
    settings: JsonFields | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
    is_interleaved: bool = False,
    aliases: Mapping[str, RopeKind] = MappingProxyType({}),
) -> tuple[RopeConfig, int]:
    """Return the rotary settings, and the longest sequence that they allow.

    Args:
        fields: config.json.
        trained_len: the longest sequence in training.
        head_dim: size of a head.
        settings: as from `rope_settings`, which is the default.
        theta: unless config.json has another.
        share: rotated part of a head, unless config.json has another.
        is_interleaved: as in `RopeConfig`.
        aliases: alternative names of kinds.
    """
    settings = settings or rope_settings(fields)
    name = settings.text("rope_type") or settings.text("type") or "default"
    name = "default" if name == "mrope" else name
    kind = aliases.get(name) or next((kind for kind in ROPE_KINDS if kind == name), None)
    if kind is None:
        raise ConfigError(f"config.json: rope type {name[:64]!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    share = settings.number("partial_rotary_factor", fields.number("partial_rotary_factor", share))
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"config.json: head_dim {head_dim} and partial_rotary_factor {share} rotate {dim} numbers of a head; "
            "it must be an even number"
        )
    theta = settings.number("rope_theta", 0.0) or fields.number("rope_theta", 0.0) or theta
    original = trained_len
    if kind in ("llama3", "yarn", "longrope"):
        within = settings.whole("original_max_position_embeddings", trained_len)
        original = fields.whole("original_max_position_embeddings", within)
    default = RopeConfig(
        kind="default",
        dim=dim,
        theta=theta,
        original_max_len=original,
        is_interleaved=is_interleaved,
        sections=_sections(settings, dim, alternate=settings.flag("mrope_interleaved")),
        sections_alternate=settings.flag("mrope_interleaved"),
    )
    if kind == "default":
        return default, trained_len
    usual = trained_len / original if kind in ("yarn", "longrope") else 0.0
    if kind == "proportional":
        kind, usual = "linear", 1.0
        default = replace(default, spread_over=head_dim if dim < head_dim else 0)
    factor = settings.number("factor", usual)
    if not 0 < factor <= _MAX_ROPE_FACTOR:
        raise ConfigError(f"config.json: rope type {kind!r} needs a positive factor, got {settings.raw('factor')}")
    scaled = replace(default, kind=kind, factor=factor)
    match kind:
        case "linear":
            return scaled if factor != 1.0 else default, trained_len
        case "dynamic":
            if dim <= 2:
                raise ConfigError(f"config.json: head_dim {head_dim} is too small for dynamic rotary scaling")
            return scaled, int(trained_len * factor)
        case "llama3":
            low, high = settings.number("low_freq_factor", 0.0), settings.number("high_freq_factor", 0.0)
            if not 0 < low <= high:
                raise ConfigError("config.json: rope type 'llama3' needs 0 < low_freq_factor <= high_freq_factor")
            return replace(scaled, low_freq_factor=low, high_freq_factor=high), trained_len
        case "longrope":
            return _longrope(scaled, settings), trained_len
        case _:
            rope = replace(
                scaled,
                beta_fast=settings.number("beta_fast", 0.0) or 32.0,
                beta_slow=settings.number("beta_slow", 0.0) or 1.0,
                truncate=settings.flag("truncate", True),
                attention_factor=_yarn_attention_factor(settings, factor),
            )
            return rope, max(trained_len, int(original * factor))


def _sections(settings: JsonFields, dim: int, *, alternate: bool) -> tuple[int, ...]:
    """Return the sections. If they alternate, those beyond the head are cut off, as in transformers."""
    sections = tuple(settings.wholes("mrope_section"))
    if sections and (len(sections) != 3 or (2 * sum(sections) != dim and not alternate)):
        raise ConfigError(f"config.json: mrope_section must be three numbers whose sum is {dim // 2}")
    return sections


def _longrope(scaled: RopeConfig, settings: JsonFields) -> RopeConfig:
    """Ding et al., 2024; the attention factor is that of section 3.3 of the Phi-3 report."""
    short, long = settings.numbers("short_factor"), settings.numbers("long_factor")
    count = scaled.dim // 2
    if not len(short) == len(long) == count or min(*short, *long) <= 0:
        raise ConfigError(f"config.json: rope type 'longrope' needs {count} positive numbers as short and long_factor")
    usual = 1.0
    if scaled.factor > 1 and scaled.original_max_len > 1:
        usual = math.sqrt(1 + math.log(scaled.factor) / math.log(scaled.original_max_len))
    attention_factor = settings.number("attention_factor", usual)
    return replace(scaled, factor=1.0, short_factors=short, long_factors=long, attention_factor=attention_factor)


def _yarn_attention_factor(settings: JsonFields, factor: float) -> float:
    """Peng et al., 2023, equation 22, with the mscale settings that DeepSeek added."""
    if settings.raw("attention_factor") is not None:
        return settings.number("attention_factor", 1.0)

    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return of(mscale) / of(mscale_all_dim)
    return of(1.0)
