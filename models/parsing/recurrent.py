"""Reads the fields that most families of mixers with a state share."""

import math
from collections.abc import Sequence

from penstock.config.options import ConfigError
from penstock.models.description.recurrent import Mamba2
from penstock.models.parsing.json_fields import JsonFields, shown

_KINDS = {
    "attention": "attention",
    "full_attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
}


LONGEST = 1 << 20
"""Longest sequence of a model in which nothing bounds it."""
_INFINITIES = ("Infinity", "inf", {"__float__": "Infinity"})
"""How JSON files, which have no such number, spell infinity."""


def mamba2(fields: JsonFields, num_heads: int, norm_eps: float, inner: int | None = None) -> Mamba2:
    """Read Mamba 2 as in Bamba and later models; `num_heads` and `inner` are defaults."""
    num_heads, num_groups = fields.whole("mamba_n_heads", num_heads), fields.whole("mamba_n_groups", 1)
    inner = inner or fields.whole("mamba_expand", 2) * fields.whole("hidden_size")
    head_dim = inner // num_heads
    if fields.raw("mamba_d_head") not in (None, "auto"):
        head_dim = fields.whole("mamba_d_head")
    if head_dim * num_heads != inner:
        raise ConfigError(f"config.json: {num_heads} Mamba heads of {head_dim} numbers are not {inner}")
    refuse_groups("mamba_n_heads", num_heads, "mamba_n_groups", num_groups)
    least, most = dt_limits(fields)
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=fields.whole("mamba_d_state", 256),
        conv_width=conv_width(fields, "mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias"),
        norm_eps=norm_eps,
        norm_groups=num_groups,
        min_dt=least,
        max_dt=most,
    )


def dt_rank(fields: JsonFields, name: str) -> int:
    """Return the rank of Mamba 1's time steps; a sixteenth of the hidden size, unless config.json has another."""
    is_usual = fields.raw(name) in (None, "auto")
    return -(-fields.whole("hidden_size") // 16) if is_usual else fields.whole(name)


def needs_silu(fields: JsonFields) -> None:
    """Refuse models whose convolutions have another activation."""
    activation = fields.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation[:64]!r} is not supported; supported: silu")


def conv_width(fields: JsonFields, name: str, default: int) -> int:
    """Return the width of a short convolution, at least two: a width of one would keep no state."""
    return fields.whole(name, default, least=2, most=64)


def refuse_groups(name: str, count: int, of_groups: str, num_groups: int) -> None:
    """Refuse heads that groups cannot share evenly."""
    if count % num_groups:
        raise ConfigError(f"config.json: {name}, {count}, is no multiple of {of_groups}, {num_groups}")


def dt_limits(fields: JsonFields, name: str = "time_step_limit") -> tuple[float, float | None]:
    """Return the least and the greatest time step; None: no upper limit."""
    value = fields.raw(name)
    if value is None:
        return 0.0, None
    found = [math.inf if each in _INFINITIES else each for each in value] if isinstance(value, list) else []
    numbers = [float(each) for each in found if type(each) in (int, float)]
    if not len(found) == len(numbers) == 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"config.json: {name} must be two numbers, the larger one last, got {shown(repr(value))}")
    return numbers[0], None if math.isinf(numbers[1]) else numbers[1]


def kinds_of_layers(fields: JsonFields, num_layers: int, default: Sequence[str]) -> Sequence[str]:
    """Return "attention" or "recurrent" for each layer, from config.json's field of either name, or `default`."""
    types = fields.texts("layer_types") or fields.texts("layers_block_type") or list(default)
    kinds = [_KINDS.get(kind, "") for kind in types]
    if len(types) != num_layers or not all(kinds):
        raise ConfigError(
            f"config.json: layer_types must name one of {', '.join(_KINDS)} {num_layers} times, got {len(types)} "
            f"names: {', '.join(sorted(set(map(shown, types)))[:4])}"
        )
    return kinds
