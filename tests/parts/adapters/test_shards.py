"""What a rank adds to each product is its part of the whole, cut and ordered as the model's weights are."""

import json
from collections.abc import Iterator

import pytest
import torch
import transformers

from penstock.config.options import ConfigError
from penstock.config.ranks import Place
from penstock.gpu_worker.models.adapters import Adapters, Factors
from penstock.gpu_worker.models.loading.stored import part_of
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import ARCHITECTURES, parse_model_config
from penstock.models.shards.shard import shard_of
from penstock.models.shards.sources import sources_of
from penstock.models.weights.sources import LinearSource, Source
from tests.gpu_worker.families.checkpoints import config_of
from tests.gpu_worker.families.table import CASES

_NAMES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
KINDS = {case.model_type: case for case in CASES.values() if _NAMES[case.model_type] in ARCHITECTURES}
RANK = 3


def matrices_of(sources: object) -> Iterator[Source]:
    """Of all products of single matrices."""
    if isinstance(sources, LinearSource):
        weight = sources.weight
        if not weight.num_stacked and all(len(shape) == 2 for shape in weight.shapes):
            yield weight
    elif isinstance(sources, tuple):
        for each in sources:
            yield from matrices_of(each)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_ranks(kind: str) -> None:
    """Alone, and as one of two: what is read of B A as a weight is what segments add."""
    config = config_of(KINDS[kind])
    config.architectures = [_NAMES[kind]]
    model = parse_model_config(json.loads(config.to_json_string(use_diff=False)))
    factors: dict[str, Factors] = {}
    stored: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    num_sites = 0
    for place in (Place(0, 1, 0, 1), Place(0, 2, 0, 1), Place(1, 2, 0, 1)):
        try:
            part = shard_of(model, place)
        except ConfigError:
            break  # the family is never split
        assert isinstance(part, Decoder)
        adapters = Adapters()
        reader = WeightReader(
            lambda name, ranges: part_of(stored[name], ranges), False, torch.float32, torch.device("cpu"),
            adapters=adapters,
        )  # fmt: skip
        for weight in matrices_of(tuple(sources_of(part).layers)):
            for name, shape in zip(weight.names, weight.shapes, strict=True):
                if name not in stored:
                    num_outputs, num_inputs = shape[::-1] if weight.is_transposed else shape
                    a, b = torch.randn(RANK, num_inputs, generator=generator), torch.randn(num_outputs, RANK)
                    factors[name.removesuffix(".weight")] = Factors(a, b)
                    stored[name] = (b @ a).t().contiguous() if weight.is_transposed else b @ a
            reader.linear(LinearSource(weight))
            whole = reader.tensor(weight)
            added = torch.zeros_like(whole)
            for first, end, a, b in adapters.sites[-1].segments(factors):
                added[first:end] += b @ a
            torch.testing.assert_close(added, whole, rtol=0, atol=1e-4)
        num_sites += len(adapters.sites)
    assert num_sites
