"""The layers of each pipeline stage: ranges that take about equally long.

All ranks, and the planner, must find the same ranges without communicating, so the ranges follow from config.json and
the options alone. A layer's cost is counted for a usual step of decodes, in bytes read from memory: such a step is
bound by memory, on GPUs and CPUs alike. Other work is added as an estimated number of bytes.
"""

from collections.abc import Sequence
from functools import cache

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Attention, Decoder, Experts, LatentAttention
from penstock.models.product_bytes import FLOAT_BYTES, product_bytes

Range = tuple[int, int]
"""The first layer, and the one after the last."""

_ROWS, _CONTEXT = 16, 512
"""The usual step: its number of sequences, and the positions of each."""

_LAYER_BYTES = 1 << 17
"""A layer's cost beside reading: norms, rotations, and the overhead of each operation."""


@cache
def stage_ranges(decoder: Decoder, num_stages: int, given: str = "") -> tuple[Range, ...]:
    """Return the layers of each stage.

    Args:
        decoder: the whole model.
        num_stages: number of stages.
        given: numbers of layers per stage, such as "10,12"; empty: balanced.

    Raises:
        ConfigError: the model cannot be split that way.
    """
    num_layers = len(decoder.layers)
    if num_stages == 1 and not given:
        return ((0, num_layers),)
    if num_stages > num_layers:
        raise ConfigError(f"--pipeline-parallel-size {num_stages}: the model has only {num_layers} layers")
    borders = _borders(decoder)
    if given:
        return _as_given(given, num_stages, num_layers, borders)
    if num_stages > len(borders) + 1:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: layers that share keys, values or choices must be in one stage, "
            f"which leaves at most {len(borders) + 1} stages"
        )
    return _balanced(stage_costs(decoder), num_stages, borders)


def most_stages(decoder: Decoder) -> int:
    """Return how many stages the model can be cut into."""
    return len(_borders(decoder)) + 1


@cache
def stage_costs(decoder: Decoder) -> tuple[int, ...]:
    """Return the cost of each layer in a usual step of decodes, in bytes; the last one's includes the head's."""
    of_products = product_bytes(decoder)
    costs = [_layer_cost(decoder, i) for i in range(len(decoder.layers))]
    *_, head = of_products.values()
    costs[-1] += round(head)
    return tuple(costs)


@cache
def stage_shares(decoder: Decoder, num_stages: int, given: str = "") -> tuple[float, ...]:
    """Return each stage's part of a step's time; the parts sum to 1."""
    costs = stage_costs(decoder)
    return tuple(sum(costs[first:end]) / sum(costs) for first, end in stage_ranges(decoder, num_stages, given))


def _layer_cost(decoder: Decoder, number: int) -> int:
    layer, prefix = decoder.layers[number], decoder.names.layer.format(number)
    read = sum(size for name, size in product_bytes(decoder).items() if name.startswith(prefix))
    for experts in (layer.mlp, None if layer.beside_mlp is None else layer.beside_mlp.experts):
        if isinstance(experts, Experts):  # assuming that tokens choose experts evenly and independently
            all_of_them = float(experts.count * experts.width_of_each * decoder.hidden_size)
            unused = (1 - experts.router.top_k / experts.count) ** _ROWS
            read *= 1 - unused * all_of_them / (all_of_them + _dense_weights(decoder, number))
    mixer = layer.attention
    if mixer is None:
        return round(read) + _LAYER_BYTES
    window, kv = mixer.window if isinstance(mixer, Attention) else None, mixer.kv
    kept = kv.num_heads * (kv.key_dim + kv.value_dim) * FLOAT_BYTES
    return round(read + _ROWS * kept * min(_CONTEXT, window or _CONTEXT)) + _LAYER_BYTES


def _dense_weights(decoder: Decoder, number: int) -> float:
    """Return the number of weights in a layer that every token is multiplied with."""
    layer = decoder.layers[number]
    shared = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
    return float(sum(part.width for part in (layer.mixer, shared) if part is not None)) * decoder.hidden_size


def _borders(decoder: Decoder) -> list[int]:
    """Return the layers that a stage may begin with: no later layer needs what an earlier one has kept or chosen."""
    first_read, chosen_by = list[int](), 0
    for number, layer in enumerate(decoder.layers):
        mixer, needed = layer.mixer, number
        if isinstance(mixer, Attention) and mixer.shares_kv_of is not None:
            needed = mixer.shares_kv_of
        if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            chosen_by = needed = chosen_by if mixer.indexer.is_shared else number
        first_read.append(needed)
    return [i for i in range(1, len(first_read)) if min(first_read[i:]) >= i]


def _as_given(given: str, num_stages: int, num_layers: int, borders: Sequence[int]) -> tuple[Range, ...]:
    counts = [int(word) if word.strip().isdecimal() else 0 for word in given.split(",")]
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline_layers {given}: {num_stages} numbers are needed, separated by commas, whose sum is the "
            f"model's {num_layers} layers"
        )
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    for end in ends[:-1]:
        if end not in borders:
            raise ConfigError(
                f"pipeline_layers {given}: layer {end} or one after it reads keys, values or choices of an earlier "
                "one, so they must be in one stage"
            )
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _balanced(costs: Sequence[int], num_stages: int, borders: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges that minimise the greatest cost; of those, the ones with the most even costs."""
    places = [0, *borders, len(costs)]
    sums = [sum(costs[:place]) for place in places]
    # best[i]: for the best ranges that end at place i, (greatest cost, sum of squares, their ends).
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * (len(places) - 1)]
    for _ in range(num_stages):
        found: list[tuple[int, int, tuple[int, ...]] | None] = [None] * len(places)
        for end in range(1, len(places)):
            for begin in range(end):
                before = best[begin]
                if before is None:
                    continue
                cost = sums[end] - sums[begin]
                one = (max(before[0], cost), before[1] + cost * cost, (*before[2], places[end]))
                its = found[end]
                if its is None or one < its:
                    found[end] = one
        best = found
    last = best[-1]
    assert last is not None
    return tuple(zip((0, *last[2][:-1]), last[2], strict=True))
