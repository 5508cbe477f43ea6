"""Vectors and classes of every family of encoders are transformers' in fp32, whatever shares their steps."""

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from penstock.config import ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.ipc.messages import Pooling, PoolingKind, SamplingParams, SequenceDelta
from penstock.models.shards.rank_part import rank_part
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.encoders.checkpoints import CASES, Reference, make, says

TOLERANCE = 2e-5
TEXTS = [[5 + (13 * i + 7 * j) % 90 for j in range(length)] for i, length in enumerate((30, 7, 1, 7, 61, 30, 12))]
SCHEDULES = {
    "all at once": {"max_num_batched_tokens": 512},
    "one at a time": {"max_num_batched_tokens": 61, "pipeline_depth": 1},
    "small pages, two rows": {"max_num_batched_tokens": 64, "page_size": 4, "max_num_seqs": 2, "pipeline_depth": 1},
}
KINDS: tuple[PoolingKind, ...] = ("cls", "mean", "last", "max", "weighted_mean", "mean_sqrt_len")


class Pooled(Engine):
    """Keeps vectors."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.vectors: dict[str, Tensor] = {}

    def _take(self, delta: SequenceDelta) -> None:
        super()._take(delta)
        assert not delta.token_ids
        self.vectors[delta.request_id] = torch.tensor(array("f", delta.pooled))

    def pool(self, asked: list[tuple[list[int], Pooling]]) -> list[Tensor]:
        """The vectors of these texts."""
        params = (SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling) for _, pooling in asked)
        ids = [self.add(text, each) for (text, _), each in zip(asked, params, strict=True)]
        self.drain()
        return [self.vectors[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {name: make(case, tmp_path_factory.mktemp("encoder")) for name, case in CASES.items()}


def pooled(states: Tensor, kind: str) -> Tensor:
    match kind:
        case "cls":
            return states[0]
        case "mean":
            return states.mean(0)
        case "max":
            return states.amax(0)
        case "weighted_mean":
            weights = torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
            return (weights * states).sum(0) / weights.sum()
        case "mean_sqrt_len":
            return states.sum(0) / math.sqrt(len(states))
        case _:
            return states[-1]


def check(found: Tensor, right: Tensor) -> None:
    assert found.shape == right.shape
    assert float((found - right).abs().max()) < TOLERANCE * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_vectors(references: dict[str, Reference], name: str) -> None:
    reference = references[name]
    number = list(CASES).index(name)
    for kernels in ("torch", "native"):
        engine = Pooled(reference.folder, cpu_kernels=kernels, **list(SCHEDULES.values())[number % len(SCHEDULES)])
        second_from = 3 if reference.case.has_types else 0
        asked = [(text, Pooling(kind, is_normalized=False)) for text in TEXTS for kind in KINDS]
        pairs = [Pooling("mean", is_normalized=False, second_from=second_from) for _ in TEXTS if second_from]
        asked += [(text, pooling) for text, pooling in zip(TEXTS, pairs, strict=False) if len(text) > second_from]
        for (text, pooling), vector in zip(asked, engine.pool(asked), strict=True):
            check(vector, pooled(reference.states(text, pooling.second_from), pooling.kind))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(references: dict[str, Reference], schedule: str) -> None:
    engine = Pooled(references["modernbert"].folder, **SCHEDULES[schedule])
    for text, vector in zip(TEXTS, engine.pool([(text, Pooling("mean", 24)) for text in TEXTS]), strict=True):
        right = functional.normalize(references["modernbert"].states(text).mean(0)[:24], dim=0)
        check(vector, right)


@pytest.mark.parametrize("name", [name for name in CASES if "class" in name])
def test_classes(references: dict[str, Reference], name: str) -> None:
    reference = references[name]
    engine = Pooled(reference.folder)
    second_from = 3 if reference.case.has_types else 0
    kind: PoolingKind = "mean" if "means" in name else "cls"
    asked = [(text, Pooling(kind, returns="classes", second_from=min(second_from, len(text) - 1))) for text in TEXTS]
    for (text, pooling), logits in zip(asked, engine.pool(asked), strict=True):
        check(logits, reference.logits(text, pooling.second_from))


def test_bf16(references: dict[str, Reference]) -> None:
    """Rounding is all that changes."""
    for kernels in ("torch", "native"):
        engine = Pooled(references["bert"].folder, dtype="bfloat16", cpu_kernels=kernels)
        for text, vector in zip(TEXTS, engine.pool([(text, Pooling("mean")) for text in TEXTS]), strict=True):
            right = functional.normalize(references["bert"].states(text).mean(0), dim=0)
            assert float(vector @ right) > 0.999


def test_dense_modules(references: dict[str, Reference]) -> None:
    """They come behind the pooling, with their weights, and before the vector gets length 1."""
    reference = references["bert, relu"]
    sizes = {"in_features": 64, "out_features": 20, "bias": True}
    dense = sizes | {"activation_function": "torch.nn.modules.activation.Tanh"}
    says(reference.folder, ("Transformer", {}), ("Pooling", {"pooling_mode_cls_token": True}), ("Dense", dense))
    weight, bias = torch.randn(20, 64), torch.randn(20)
    path = reference.folder / "2_Dense" / "model.safetensors"
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Pooled(reference.folder)
    save_file({"linear.weight": weight[:19], "linear.bias": bias}, path)
    with pytest.raises(ConfigError, match=r"shape \[19, 64\]"):
        Pooled(reference.folder)
    save_file({"linear.weight": weight, "linear.bias": bias}, path)
    [vector] = Pooled(reference.folder).pool([(TEXTS[0], Pooling("cls"))])
    right = torch.tanh(weight @ reference.states(TEXTS[0])[0] + bias)
    check(vector, functional.normalize(right, dim=0))


def test_refused(references: dict[str, Reference]) -> None:
    """Tokens, and texts that are longer than a step."""
    engine = Pooled(references["bert"].folder, max_num_batched_tokens=40)
    with pytest.raises(ValueError, match="generates no text"):
        engine.add([5] * 3, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="41 tokens"):
        engine.add([5] * 41, SamplingParams(max_tokens=1, pooling=Pooling("cls")))
    assert not engine.has_work
    [vector] = engine.pool([([5] * 40, Pooling("cls"))])
    check(vector, functional.normalize(references["bert"].states([5] * 40)[0], dim=0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, "draws no tokens"),
        ({"host_kv_gib": 0.1}, "keeps nothing"),
        ({"quantization": "int8"}, "is an encoder, with floats only"),
    ],
)
def test_options_without_use_are_refused(references: dict[str, Reference], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pooled(references["bert"].folder, **options)


@pytest.mark.parametrize(
    "options", [ParallelOptions(tensor_parallel_size=2), ParallelOptions(pipeline_parallel_size=2)]
)
def test_it_is_not_split(references: dict[str, Reference], options: ParallelOptions) -> None:
    config = load_model_config(references["bert"].folder)
    with pytest.raises(ConfigError, match="is an encoder, which cannot be split"):
        rank_part(config, options, 0)


@pytest.mark.parametrize("name", ["bert, classes", "modernbert, classes of means", "nomic", "roberta"])
def test_the_same_bits_in_any_batch(references: dict[str, Reference], name: str) -> None:
    """On the native kernels a text's vector is the same alone and beside others, with any number of threads."""
    classes = Pooling("mean" if "means" in name else "cls", returns="classes")
    kinds = [Pooling("mean"), Pooling("max"), *[classes] * ("classes" in name)]
    asked = [(text, pooling) for text in TEXTS for pooling in kinds]
    together = Pooled(references[name].folder, num_threads=2).pool(asked)
    alone = Pooled(references[name].folder, num_threads=1)
    assert alone.hello.is_batch_invariant
    for each, vector in zip(asked, together, strict=True):
        assert torch.equal(alone.pool([each])[0], vector)
