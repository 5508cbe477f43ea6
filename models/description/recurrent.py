"""Mixers that keep a state of a row instead of data for each position.

A state does not grow with the row: it has the last inputs of a short convolution, and a matrix for each head.
"""

import math
from typing import NamedTuple

import msgspec


class StateTensor(NamedTuple):
    """A part of a layer's state of a row, in fp32."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.shape)


StateShape = tuple[StateTensor, ...]


class Mamba1(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba (Gu and Dao, 2023). A token gives x and z; x goes through a short convolution, then gives r, B and C.

    With dt = softplus(steps(r) + dt_bias) and a = exp(-exp(A_log) * dt), for each channel:
    state = a * state + B (dt * x), and y = state . C + D x. The output is out(y * silu(z)).
    """

    inner: int  # channels of x
    state_size: int  # of a channel
    dt_rank: int  # size of r
    conv_width: int
    conv_bias: bool = True
    has_bias: bool = False  # of the projections from and to hidden states
    norm_eps: float | None = None  # None: r, B and C are not normed
    norms_have_weights: bool = True

    @property
    def num_gates(self) -> int:
        """Size of r, B and C."""
        return self.dt_rank + 2 * self.state_size

    @property
    def state(self) -> StateShape:
        """What it keeps of a row."""
        return (
            StateTensor("conv", (self.conv_width - 1, self.inner)),
            StateTensor("scan", (self.state_size, self.inner)),
        )

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return 4 * self.inner + self.num_gates


class Mamba2(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba 2 (Dao and Gu, 2024). A token gives z, x, B, C and dt; x, B and C go through a short convolution.

    With a = exp(-exp(A_log) * dt), for each head: state = a * state + B (dt * x)^T, and y = state^T C + D x. The output
    is out(norm(y * silu(z))).
    """

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share B and C
    state_size: int
    conv_width: int
    conv_bias: bool = True
    has_bias: bool = False  # of both projections
    norm_eps: float | None = None  # None: y * silu(z) is not normed
    norm_groups: int = 1  # groups of numbers that are normed together
    norm_precedes_gate: bool = False  # norm(y) * silu(z)
    min_dt: float = 0.0
    max_dt: float | None = None
    in_scales: tuple[float, ...] | None = None  # of z, x, B, C and dt

    @property
    def inner(self) -> int:
        """Size of x, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def num_projected(self) -> int:
        """Outputs of the first projection per token."""
        return self.inner + self.conv_channels + self.num_heads

    @property
    def state(self) -> StateShape:
        """What it keeps of a row."""
        return (
            StateTensor("conv", (self.conv_width - 1, self.conv_channels)),
            StateTensor("scan", (self.num_heads, self.state_size, self.head_dim)),
        )

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return self.num_projected + self.inner


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet (Yang et al., 2024). q, k and v go through a short convolution; q and k get unit length.

    With g = exp(-exp(A_log) * softplus(a + dt_bias)) and beta = max_beta * sigmoid(b), for each value head:
    state = g * state; state += k (beta * (v - state^T k))^T, and y = state^T q / sqrt(key_dim). The output is
    out(norm(y) * silu(z)), normed by head.
    """

    num_key_heads: int
    num_value_heads: int  # each key head serves equally many neighbouring ones
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    norm_eps: float
    max_beta: float = 1.0  # above 1, what a key held before may change its sign
    is_grouped: bool = False  # each key head's q, k, v and z are stored next to each other; so are b and a

    @property
    def key_size(self) -> int:
        """Size of k, over all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Size of v, over all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateShape:
        """What it keeps of a row."""
        return (
            StateTensor("conv", (self.conv_width - 1, self.conv_channels)),
            StateTensor("delta", (self.num_value_heads, self.key_dim, self.value_dim)),
        )

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return self.conv_channels + 2 * self.value_size + 2 * self.num_value_heads


class KimiDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Kimi Delta Attention (Moonshot AI, 2025): as `GatedDelta`, but each number of a key decays by itself.

    A token also gives small vectors f and z: g = exp(-exp(A_log) * softplus(steps(f) + dt_bias)), and the output is
    out(norm(y) * sigmoid(opening(z))).
    """

    num_heads: int
    head_dim: int  # of q, k and v; and the size of f and z
    conv_width: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """Size of each of q, k and v, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_gates(self) -> int:
        """Size of f, z and b."""
        return 2 * self.head_dim + self.num_heads

    @property
    def state(self) -> StateShape:
        """What it keeps of a row."""
        return (
            StateTensor("conv", (self.conv_width - 1, 3 * self.inner)),
            StateTensor("delta", (self.num_heads, self.head_dim, self.head_dim)),
        )

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return 6 * self.inner + self.num_gates


class ShortConv(msgspec.Struct, frozen=True, kw_only=True):
    """A gated convolution over the last positions (LFM 2, 2025): a token gives B, C and x; out(C * conv(B * x))."""

    size: int  # of each of B, C and x
    conv_width: int
    has_bias: bool = False  # of the projections and of the convolution

    @property
    def state(self) -> StateShape:
        """What it keeps of a row."""
        return (StateTensor("conv", (self.conv_width - 1, self.size)),)

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return 4 * self.size


Recurrent = Mamba1 | Mamba2 | GatedDelta | KimiDelta | ShortConv
