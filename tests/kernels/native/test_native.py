"""The CPU's own kernels: against the torch path, and bit for bit against themselves in other batches."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderModel, DecoderWeights
from penstock.gpu_worker.models.linear import Linear, PlainEmbedding, PlainLinear
from penstock.gpu_worker.models.loading.decoder_build import read_weights
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import ForwardInputs, GroupInputs, Model
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.state.kv_pool import KVPool, page_groups
from penstock.kernels.native.library import Library
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.sampling.token_masks import mask_tokens_reference
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.weights.decoder import decoder_tensors
from tests.gpu_worker.checkpoints import attention_of
from tests.kernels.native.native_library import load_library

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
}
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one kv head, biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "odd sizes, tied": {"hidden_size": 47, "intermediate_size": 33, "tie_word_embeddings": True, "head_dim": 16},
    "gelu": {"hidden_act": "gelu", "num_key_value_heads": 6},
    "tanh gelu": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 128},
    "window": {"architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "more than one block of inputs": {"hidden_size": 300, "intermediate_size": 200},
    "q and k norms": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}
_PAGES = 160
Piece = tuple[int, int, int]
"""(sequence, first position, number of tokens) of a batch's row."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def dense_config(raw: dict[str, Any]) -> Decoder:
    config = parse_model_config(raw)
    assert isinstance(config, Decoder)
    return config


def weights(config: Decoder, dtype: torch.dtype) -> DecoderWeights:
    """Random ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = decoder_tensors(config)

    def read(name: str, ranges: object) -> Tensor:
        drawn = torch.empty(shapes[name]).normal_(0, 1, generator=generator)
        return drawn if "embed" in name else 1 + 0.1 * drawn if "norm" in name else 0.1 * drawn

    found = read_weights(config, WeightReader(read, dtype == torch.bfloat16, dtype, torch.device("cpu")))
    return found._replace(layers=tuple(found.layers))


class World:
    """Four sequences of known tokens, a KV pool, and their pages in it."""

    def __init__(self, config: Decoder, page_size: int, kv_dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(2)
        self.config, self.page_size = config, page_size
        self.lens = (1, 16, 110, 131)  # more tokens in all than a product takes at a time
        self.ids = [torch.randint(config.vocab_size, (n,), generator=generator, dtype=torch.int32) for n in self.lens]
        pages = torch.randperm(_PAGES * 16 // page_size, generator=generator, dtype=torch.int32)
        groups = page_groups(config, page_size)
        widths = [-(-max(self.lens) // group.page_size) for group in groups]
        parts = pages.split([*(4 * width for width in widths), len(pages) - 4 * sum(widths)])
        self.tables = [part.view(4, width) for part, width in zip(parts, widths, strict=False)]
        self.kv = KVPool(groups, pages.shape[0], kv_dtype, torch.device("cpu"))

    def batch(self, pieces: Sequence[Piece]) -> ForwardInputs:
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
        sequences = torch.cat([torch.full((count,), s) for s, _, count in pieces])
        starts = [0, *itertools.accumulate(count for _, _, count in pieces)]
        seq_lens = [first + count for _, first, count in pieces]
        in_groups = []
        for table, group in zip(self.tables, self.kv.groups, strict=True):
            pages, size = table[sequences, positions // group.page_size].long(), group.page_size
            in_groups.append(GroupInputs(pages * size + positions % size, table[[s for s, _, _ in pieces]]))
        return ForwardInputs(
            input_ids=torch.cat([self.ids[s][first : first + count] for s, first, count in pieces]),
            positions=positions,
            rows=torch.tensor([s for s, _, _ in pieces], dtype=torch.int32),
            slot_mapping=in_groups[0].slot_mapping,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=in_groups[0].page_table,
            max_query_len=max(count for _, _, count in pieces),
            max_seq_len=max(seq_lens),
            others=tuple(in_groups[1:]),
        )

    def run(self, model: Model, batches: Sequence[Sequence[Piece]]) -> list[Tensor]:
        """The logits of each sequence's tokens, [tokens, V], after these batches from an empty pool."""
        self.kv.blocks.zero_()
        model.prepare(CpuDevice(torch.get_num_threads()), 4, 512)
        found: list[dict[int, Tensor]] = [{} for _ in self.lens]
        for pieces in batches:
            logits = model.logits(model.forward(self.batch(pieces), self.kv))
            rows = iter(logits)
            for s, first, count in pieces:
                found[s] |= {position: next(rows) for position in range(first, first + count)}
        return [torch.stack([rows[i] for i in range(n)]) for rows, n in zip(found, self.lens, strict=True)]


def whole(world: World) -> list[list[Piece]]:
    """Every sequence at once, in one batch."""
    return [[(s, 0, n) for s, n in enumerate(world.lens)]]


def alone(world: World) -> list[list[Piece]]:
    """One after the other, prompts at once."""
    return [[(s, 0, n)] for s, n in enumerate(world.lens)]


def by_token(world: World) -> list[list[Piece]]:
    """All together, each step one token of each."""
    return [[(s, i, 1) for s, n in enumerate(world.lens) if i < n] for i in range(max(world.lens))]


def in_chunks(world: World) -> list[list[Piece]]:
    """Sequences in chunks of 1, 13, 1 and 5, with no regard for each other."""
    sizes = (1, 13, 1, 5)
    steps = [
        [(s, i * size, min(size, n - i * size)) for s, (n, size) in enumerate(zip(world.lens, sizes, strict=True))]
        for i in range(max(world.lens))
    ]
    left = [[piece for piece in pieces if piece[2] > 0] for pieces in steps]
    return [pieces for pieces in left if pieces]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
@torch.inference_mode()
def test_like_torch(library: Library, kind: str, page_size: int) -> None:
    config = dense_config(_TINY | _KINDS[kind])
    stored = weights(config, torch.float32)
    world = World(config, page_size)
    expected = world.run(DecoderModel(config, stored), whole(world))
    kv = world.kv.blocks.clone()
    found = world.run(NativeDecoderModel(config, stored, library), whole(world))
    torch.testing.assert_close(world.kv.blocks, kv, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "window", "odd sizes, tied", "more than one block of inputs"])
@torch.inference_mode()
def test_the_same_bits_in_any_batch(library: Library, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    config = dense_config(_TINY | _KINDS[kind])
    model = NativeDecoderModel(config, weights(config, dtype), library)
    expected = World(config, 16, kv_dtype).run(model, alone(World(config, 16)))
    for page_size, batches in itertools.product((1, 16, 64), (whole, by_token, in_chunks)):
        world = World(config, page_size, kv_dtype)
        for one, other in zip(world.run(model, batches(world)), expected, strict=True):
            assert torch.equal(one, other), (page_size, batches.__name__)


@pytest.mark.parametrize("kind", ["plain", "odd sizes, tied", "more than one block of inputs"])
@torch.inference_mode()
def test_the_same_bits_in_any_batch_with_rounded_inputs(library: Library, kind: str) -> None:
    """Also on a processor without the instruction for it; and near what torch makes of such inputs."""
    config = dense_config(_TINY | _KINDS[kind])
    stored = weights(config, torch.bfloat16)
    model = NativeDecoderModel(config, stored, library, rounds_inputs=True)
    expected = World(config, 16, torch.bfloat16).run(model, alone(World(config, 16)))
    for batches in (whole, by_token, in_chunks):
        world = World(config, 16, torch.bfloat16)
        for one, other in zip(world.run(model, batches(world)), expected, strict=True):
            assert torch.equal(one, other), batches.__name__
    exact = World(config, 16, torch.bfloat16).run(NativeDecoderModel(config, stored, library), alone(world))
    for one, other in zip(expected, exact, strict=True):
        assert not torch.equal(one, other)
        assert (one - other).abs().max() < 0.05 * other.abs().max()


@pytest.mark.parametrize("num_inputs", [1, 31, 32, 33, 255, 256, 257, 600])
@pytest.mark.parametrize("num_tokens", [1, 2, 12, 13, 100])
def test_products_of_rounded_inputs(library: Library, num_inputs: int, num_tokens: int) -> None:
    """As of the rounded numbers themselves, which are exact in fp64."""
    generator = torch.Generator().manual_seed(num_inputs)
    stored = torch.randn(70, num_inputs, generator=generator).bfloat16()
    x = torch.randn(num_tokens, num_inputs, generator=generator)
    head = library.pack(stored, rounds_inputs=True)
    logits = ProgramBuilder(num_inputs).build(library, head).logits(x)
    expected = x.bfloat16().double() @ stored.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5 * num_inputs**0.5)


@torch.inference_mode()
def test_stored_bf16_weights_are_computed_with_exactly(library: Library) -> None:
    def widened_linear(linear: Linear) -> PlainLinear:
        assert isinstance(linear, PlainLinear)
        return PlainLinear(linear.weight.float())

    def widened_mlp(mlp: object) -> MLPBlock:
        assert isinstance(mlp, MLPBlock)
        return mlp._replace(gate_up=widened_linear(mlp.gate_up), down=widened_linear(mlp.down))

    config = dense_config(_TINY)
    stored = weights(config, torch.bfloat16)
    assert stored.head is not None
    assert stored.embedding is not None
    table = stored.embedding.pack(library)
    assert isinstance(table, torch.Tensor)
    widened = DecoderWeights(
        PlainEmbedding(table.float()),
        None,
        tuple(
            layer._replace(
                mixer=attention_of(layer)._replace(
                    qkv=widened_linear(attention_of(layer).qkv), o=widened_linear(attention_of(layer).o)
                ),
                mlp=widened_mlp(layer.mlp),
            )
            for layer in stored.layers
        ),
        stored.final_norm,
        widened_linear(stored.head),
    )
    world = World(config, 16)
    found = world.run(NativeDecoderModel(config, stored, library), whole(world))
    for one, other in zip(found, world.run(NativeDecoderModel(config, widened, library), whole(world)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
@pytest.mark.parametrize("num_masked", [1, 20])
def test_masks_like_the_reference(library: Library, vocab_size: int, num_masked: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator)
    indices = torch.randperm(40, generator=generator)[:num_masked]
    bits = torch.randint(-(2**31), 2**31 - 1, (num_masked, -(-vocab_size // 32)), generator=generator).int()
    bits[0] = -1  # all of a row may be drawn
    expected = mask_tokens_reference(logits, indices, bits)
    library.mask_tokens(logits, indices.numpy(), bits.numpy())
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="do not fit"):
        library.mask_tokens(torch.zeros(2, vocab_size + 32), indices.numpy(), bits.numpy())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batches", [whole, by_token, in_chunks])
@torch.inference_mode()
def test_a_step_reads_its_inputs_from_the_tables(
    library: Library, page_size: int, batches: Callable[[World], list[list[Piece]]]
) -> None:
    """The same bits as from inputs that are made outside, for those rows that are asked for."""
    world = World(dense_config(_TINY), page_size)
    model = NativeDecoderModel(world.config, weights(world.config, torch.float32), library)
    expected = world.run(model, alone(world))
    world.kv.blocks.zero_()
    row_of = [5, 0, 3, 2]  # of each sequence
    token_ids = torch.zeros(6, max(world.lens) + 3, dtype=torch.int32)
    page_table = torch.zeros(6, world.tables[0].shape[1] + 2, dtype=torch.int32)
    for row, ids, pages in zip(row_of, world.ids, world.tables[0], strict=True):
        token_ids[row, : len(ids)] = ids
        page_table[row, : len(pages)] = pages
    step = model.whole_step(token_ids, [page_table], world.kv)
    assert step is not None
    for i, pieces in enumerate(batches(world)):
        columns = np.array([(row_of[s], first, count) for s, first, count in pieces], dtype=np.int32).T
        rows, start, num_new = np.ascontiguousarray(columns)
        samples = np.flatnonzero(np.arange(len(pieces)) % 3 != i % 4)
        logits = step.compute(rows, start, num_new, samples)
        assert logits.shape == (len(samples), world.config.vocab_size)
        for found, (s, first, count) in zip(logits, (pieces[j] for j in samples), strict=True):
            assert torch.equal(found, expected[s][first + count - 1])


@torch.inference_mode()
def test_a_negative_slot_keeps_nothing(library: Library) -> None:
    config = dense_config(_TINY)
    model = NativeDecoderModel(config, weights(config, torch.float32), library)
    world = World(config, 16)
    model.prepare(CpuDevice(1), 4, 512)
    inputs = world.batch([(2, 0, 5)])
    model.forward(inputs._replace(slot_mapping=torch.full((5,), -1)), world.kv)
    assert not world.kv.blocks.any()


@pytest.mark.parametrize("inner", [10, 32, 512, 526])
@torch.inference_mode()
def test_rounded_inputs_of_any_number_give_a_token_the_same_bits_in_long_steps(library: Library, inner: int) -> None:
    """Fewer than a tile of them, whole tiles, a whole block of tiles, and one with a rest."""
    config = dense_config(_TINY | {"intermediate_size": inner})
    stored = weights(config, torch.bfloat16)
    model = NativeDecoderModel(config, stored, library, rounds_inputs=True)
    world = World(config, 16, torch.bfloat16)
    found = world.run(model, [[(3, 0, 131)], [(0, 0, 1)], [(1, 0, 16)], [(2, 0, 110)]])
    expected = world.run(NativeDecoderModel(config, stored, library), alone(world))
    for one, other, each in zip(found, world.run(model, alone(world)), expected, strict=True):
        assert torch.equal(one, other)
        assert (one - each).abs().max() < 0.05 * each.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (70, 33), (96, 300), (200, 64)])
def test_what_is_packed_can_be_unpacked(
    library: Library, shape: tuple[int, int], interleaved: bool, dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    packed = library.pack(weight, bias, interleaved=interleaved)
    out = torch.zeros(shape, dtype=dtype)
    library.unpack(packed, out)
    assert torch.equal(out, weight)
    found = packed.plain_bias()
    assert found is not None
    assert torch.equal(found, bias)
