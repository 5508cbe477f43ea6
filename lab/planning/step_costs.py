"""The time of a step on a measured machine: a sum of amounts of work, each at a measured rate.

A step on a CPU does not follow a roofline: its parts do not overlap, and overhead that is negligible for a model of a
gigabyte is most of a small model's step. So a step is described by amounts (`amounts`), and a machine by the seconds
per unit of each. These rates are found by non-negative least squares over the steps of made-up models of various
shapes.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.lab.planning.costs import Chunks
from penstock.models.description.decoder import (
    Attention,
    Decoder,
    Experts,
    LatentAttention,
    Layer,
    positions_seen,
)

Floats = npt.NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""Numbers of tokens at which the product of one weight with them is measured; other numbers are interpolated."""
_AT = [f"@{knot}" for knot in KNOTS]
_PLAIN = ("step", "layer", "row", "prompt", "activation", "pair", "prompt_pair", "prompt_kept", "logit")
PARTS = (*_PLAIN, *(f"{where}{what}" for where in ("cached", "streamed") for what in ("@kept", *_AT)))
"""The parts of a step's work:

step, layer, row, prompt: the step itself, its layers, its sequences, and those of them with more than one token.
activation: numbers that the tokens bring from one operation to the next.
pair, prompt_pair: multiplications of a query with the positions that it sees, in decodes and in prompts.
prompt_kept: keys and values that the tokens of prompts see.
logit: logits that a token is drawn from.
cached, streamed: what a step reads, from the last cache or from memory: @kept, keys and values of decoding sequences;
    @N, weights that N tokens are multiplied with.
"""
_HOST = ("step", "layer", "row", "prompt")


class _Products(NamedTuple):
    """The matrices of a decoder, by how many of a step's tokens each is multiplied with."""

    of_all: float  # weights that each token is multiplied with
    head: float
    experts: tuple[tuple[int, int, float], ...]  # (experts, experts per token, weights per expert)


class Pace(msgspec.Struct, frozen=True):
    """Step times now, as multiples of those when the costs were measured."""

    computing: float = 1.0
    streaming: float = 1.0  # for single-token steps that read weights from memory


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's seconds for each of PARTS, with weights of one format."""

    seconds: tuple[float, ...]
    cache: float  # bytes of the last cache
    bytes_per_weight: float

    def of_step(self, decoder: Decoder, chunks: Chunks) -> tuple[float, float]:
        """Return a step's seconds, and the part that depends neither on matrices nor on the lengths of sequences."""
        each = amounts(decoder, chunks, self.cache / self.bytes_per_weight) * np.array(self.seconds)
        return float(each.sum()), float(each[: len(_HOST)].sum())

    def at_pace(self, pace: Pace) -> "StepCosts":
        """Return the costs while the machine is quicker or slower.

        Steps wait for weights from memory. For a single token, the wait is the extra time over cached weights; for
        more tokens it is at most that. It changes so that a single token's weights take as long as `pace` says; all
        other times change with the computation.
        """
        plain, count = len(_PLAIN), 1 + len(KNOTS)
        cached, streamed = self.seconds[plain : plain + count], self.seconds[plain + count :]
        of_one = 1 + KNOTS.index(1)  # after @kept
        most = max(0.0, streamed[of_one] - cached[of_one])
        change = max(-most, (pace.streaming - 1) * streamed[of_one] - (pace.computing - 1) * (streamed[of_one] - most))
        waits = [min(most, max(0.0, other - one)) for one, other in zip(cached, streamed, strict=True)]
        scaled = [
            pace.computing * (other - wait) + wait * (1 + change / most if most else 1.0)
            for other, wait in zip(streamed, waits, strict=True)
        ]
        computed = [pace.computing * each for each in self.seconds[: plain + count]]
        return msgspec.structs.replace(self, seconds=(*computed, *scaled))

    def weight_seconds(self, num_tokens: int) -> float:
        """Return the seconds of one weight that comes from memory and is multiplied with this many tokens."""
        streamed = self.seconds[-len(KNOTS) :]
        return float(_met(num_tokens) @ np.array(streamed))


def amounts(decoder: Decoder, chunks: Chunks, cached_numbers: float) -> Floats:
    """[len(PARTS)]: how much of each part a step has.

    Args:
        decoder: computes the step.
        chunks: those of the step's sequences, each of which samples.
        cached_numbers: how many weights, keys and values the last cache could hold.
    """
    products = _products(decoder)
    num_tokens = sum(count * times for (_, count), times in chunks.items())
    num_rows = sum(chunks.values())
    met = products.of_all * _met(num_tokens) + products.head * _met(num_rows)
    for num_experts, top_k, size in products.experts:
        used = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
        met += used * size * _met(num_tokens * top_k / used)
    read = products.of_all + products.head + sum(count * size for count, _, size in products.experts)
    kept = pairs = prompt_kept = prompt_pairs = 0.0
    for (first, count), times in chunks.items():
        for num_kept, multiplications, window in _attention(decoder):
            seen = times * positions_seen(first, count, window)
            if count == 1:
                kept += num_kept * seen
                pairs += multiplications * seen
            else:
                prompt_kept += num_kept * seen
                prompt_pairs += multiplications * seen
    # The cache is shared: data up to a quarter of its size stays in it, of data as large as the cache nothing does.
    streamed = min(1.0, max(0.0, ((read + kept) / cached_numbers - 0.25) / 0.75))
    prompts = sum(times for (_, count), times in chunks.items() if count > 1)
    host = (1, len(decoder.layers), num_rows, prompts)
    of_tokens = (num_tokens * _widths(decoder), pairs, prompt_pairs, prompt_kept, num_rows * decoder.vocab_size)
    reading = np.array([kept, *met])
    return np.concatenate([host, of_tokens, (1 - streamed) * reading, streamed * reading])


def fit(decoders: Sequence[Decoder], steps: Sequence[Chunks], seconds: Floats, cached_numbers: float) -> Floats:
    """[len(PARTS)]: non-negative seconds of each part that minimise the steps' relative errors.

    Args:
        decoders: the decoder of each step.
        steps: the chunks of each step.
        seconds: the time of each step.
        cached_numbers: as in `amounts`.
    """
    rows = [amounts(decoder, chunks, cached_numbers) for decoder, chunks in zip(decoders, steps, strict=True)]
    return nonnegative_least_squares(np.array(rows) / seconds[:, None], np.ones(len(seconds)))


def nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
    """x >= 0 with the least |a x - b| (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gradient = np.where(passive, -np.inf, a.T @ (b - a @ x))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10:
            break
        passive[entering] = True
        while True:
            found = np.zeros_like(x)
            found[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            leaving = passive & (found <= 0)
            if not leaving.any():
                break
            step = float(np.min(x[leaving] / np.maximum(x[leaving] - found[leaving], 1e-300)))
            x += step * (found - x)
            passive &= ~(leaving & (x <= 1e-12))
            x[~passive] = 0.0
        x = found
    return np.asarray(x / scale, dtype=np.float64)


def _met(num_tokens: float) -> Floats:
    """[len(KNOTS)]: a product with `num_tokens`, as parts of the products at the knots."""
    found = np.zeros(len(KNOTS))
    if num_tokens >= KNOTS[-1]:
        found[-1] = num_tokens / KNOTS[-1]
    elif num_tokens > KNOTS[0]:
        place = int(np.searchsorted(KNOTS, num_tokens, side="right")) - 1
        found[place + 1] = (num_tokens - KNOTS[place]) / (KNOTS[place + 1] - KNOTS[place])
        found[place] = 1 - found[place + 1]
    elif num_tokens > 0:
        found[0] = 1
    return found


@cache
def _products(decoder: Decoder) -> _Products:
    of_all, experts = 0.0, list[tuple[int, int, float]]()
    for layer in decoder.layers:
        of_all += _width(layer)
        if isinstance(layer.mlp, Experts):
            of_all -= layer.mlp.width_of_each * layer.mlp.router.top_k
            experts.append(
                (layer.mlp.count, layer.mlp.router.top_k, float(layer.mlp.width_of_each * decoder.hidden_size))
            )
    latent = sum(its.num_latent_weights for _, its in decoder.attentions if isinstance(its, LatentAttention))
    head = float(decoder.vocab_size * decoder.hidden_size)
    return _Products(of_all * decoder.hidden_size + latent, head, tuple(experts))


@cache
def _widths(decoder: Decoder) -> float:
    return float(sum(_width(layer) + 4 * decoder.hidden_size for layer in decoder.layers))


def _width(layer: Layer) -> int:
    return sum(part.width for part in (layer.mixer, layer.mlp) if part is not None)


@cache
def _attention(decoder: Decoder) -> tuple[tuple[float, float, int | None], ...]:
    """(numbers kept per position, multiplications per position, window), summed over layers with the same window."""
    found: dict[int | None, tuple[float, float]] = {}

    def add(kept: float, multiplications: float, window: int | None) -> None:
        before = found.get(window, (0.0, 0.0))
        found[window] = before[0] + kept, before[1] + multiplications

    for _, mixer in decoder.attentions:
        shape = mixer.kv
        if isinstance(mixer, Attention):
            numbers = shape.num_heads * (shape.key_dim + shape.value_dim)
            add(numbers, mixer.num_heads * 2 * mixer.head_dim, shape.window)
            continue
        its = mixer.indexer
        # As many positions as an indexer chooses cost what the last ones would.
        window = None if its is None else its.top_k
        add(mixer.key_dim, mixer.num_heads * (2 * mixer.kv_rank + mixer.rope_dim), window)
        if (own := mixer.own_indexer) is not None:
            add(own.head_dim, own.num_heads * own.head_dim, None)
    return tuple((*numbers, window) for window, numbers in found.items())


def describe(costs: StepCosts) -> dict[str, float]:
    """Summarise a machine for people: bytes and operations per second of products, and the overheads of a step."""
    slowest = costs.weight_seconds(KNOTS[-1])
    by_name = dict(zip(PARTS, costs.seconds, strict=True))
    return {
        "weight_bytes_per_second": costs.bytes_per_weight / (costs.weight_seconds(1) or math.inf),
        "flops_per_second": 2 * KNOTS[-1] / (slowest or math.inf),
        "step_seconds": by_name["step"],
        "layer_seconds": by_name["layer"],
        "row_seconds": by_name["row"],
        "kept_bytes_per_second": costs.bytes_per_weight / (by_name["streamed@kept"] or math.inf),
        "attention_flops_per_second": 2 / (by_name["prompt_pair"] or math.inf),
    }
