"""The operations of native programs, each variant in a tiny program: against torch, or a plain reference."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.state.kv_pool import LayerPages
from penstock.kernels.activation import ActivationKind, activation, gated_activation
from penstock.kernels.attention.kv_quantization import KV_FORMATS, KVScales, PageLayout, write_quantized
from penstock.kernels.attention.qk_norm_rope_write import QKNorms, slot_cells
from penstock.kernels.native.library import Library
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.builder import ACTIVATIONS, HeadShape, ProgramBuilder, QueryGrowth
from penstock.kernels.native.program.program import GroupPages, Program, RotaryTable
from penstock.kernels.native.recurrent import Part, open_gates
from penstock.kernels.norms import NormWeights, norm_cpu
from penstock.kernels.quantized.weight import dequantized
from tests.kernels.native.native_library import load_library
from tests.kernels.quantized_cases import FORMATS

_VOCAB, _TOKENS = 37, 29
_OUT = ProgramBuilder.OUT
_DIM, _Q_HEADS, _KV_HEADS = 24, 6, 2


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def begun(size: int, hidden: int) -> tuple[ProgramBuilder, int, Tensor]:
    """A program whose first slot begins with known vectors [T, size]; the program computes [T, hidden]."""
    builder = ProgramBuilder(hidden)
    slot = builder.slot(size)
    builder.embed(random(_VOCAB, size), slot)
    return builder, slot, random(_VOCAB, size)[ids().long()]


def ids() -> Tensor:
    return torch.arange(5, 5 + _TOKENS, dtype=torch.int32)


def finished(builder: ProgramBuilder, library: Library, hidden: int) -> Program:
    return builder.build(library, library.pack(random(3, hidden)))


def run(program: Program, pool: NativePool | None = None, rotaries: tuple[RotaryTable, ...] = ()) -> Tensor:
    """Of one sequence, which has all slots of a page group to itself, from position 3 on."""
    positions = torch.arange(3, 3 + _TOKENS)
    return program.forward(
        ids(),
        positions,
        torch.tensor([0, _TOKENS], dtype=torch.int32),
        torch.tensor([3 + _TOKENS], dtype=torch.int32),
        [GroupPages(positions, torch.arange(_VOCAB, dtype=torch.int32)[None])],
        rotaries,
        pool or NativePool([]),
    )


@pytest.mark.parametrize("size", [1, 15, 16, 33, 200])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_norms(library: Library, size: int, kind: str, has_weight: bool, has_bias: bool) -> None:
    weights = NormWeights(
        random(size, seed=1) if has_weight else None,
        1e-3,
        "rms" if kind == "rms" else "layer",
        random(size, seed=2) if has_bias and kind == "layer" else None,
    )
    builder, x, expected = begun(size, size)
    other = builder.slot(size)
    builder.norm(weights, x, other, size)
    builder.norm(weights, x, other, size, added=0.5)
    builder.norm(None, other, _OUT, size)
    found = run(finished(builder, library, size))
    torch.testing.assert_close(found, 1.5 * norm_cpu(expected, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("size", [33, 64, 150])
@pytest.mark.parametrize("has_bias", [False, True])
def test_activations(library: Library, kind: ActivationKind, size: int, has_bias: bool) -> None:
    """Also where exponentials would overflow."""
    num_inputs = 45
    for is_gated in (True, False):
        if kind == "clamped_swiglu" and not is_gated:
            continue
        weight = 10 * random((1 + is_gated) * size, num_inputs, seed=1)
        bias = 30 * random(len(weight), seed=2) if has_bias else None
        builder, x, vectors = begun(num_inputs, size)
        inner = builder.slot(size)
        packed = library.pack(weight, bias, interleaved=is_gated)
        builder.product(packed, x, inner, "gate" if is_gated else "activate", activation=kind)
        builder.norm(None, inner, _OUT, size)
        product = functional.linear(vectors, weight, bias)
        assert product.min() < -100
        assert product.max() > 100
        expected = (gated_activation if is_gated else activation)(product, kind)
        torch.testing.assert_close(run(finished(builder, library, size)), expected, rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_exact_near_zero(library: Library, kind: ActivationKind) -> None:
    builder, x, vectors = begun(1, 64)
    weight = torch.linspace(-6, 6, 64)[:, None]
    slot = builder.slot(64)
    builder.product(library.pack(weight), x, slot, "activate", activation=kind)
    builder.norm(None, slot, _OUT, 64)
    found = run(finished(builder, library, 64))
    torch.testing.assert_close(found, activation(vectors @ weight.T, kind), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("size", "num_inputs"), [(1, 1), (47, 33), (64, 200), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_stored_and_added(library: Library, size: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight, bias = random(size, num_inputs, seed=1).to(dtype), random(size, seed=2)
    packed = library.pack(weight, bias)
    builder, x, vectors = begun(num_inputs, size)
    sums = builder.slot(size)
    builder.product(packed, x, sums)
    builder.product(packed, x, sums, "add", scale=-0.25)
    builder.norm(None, sums, _OUT, size)
    expected = 0.75 * functional.linear(vectors, weight.float(), bias)
    torch.testing.assert_close(run(finished(builder, library, size)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(64, 128), (40, 70, 9), (100, 1)])
def test_products_that_fill_one_slot(library: Library, sizes: tuple[int, ...]) -> None:
    """Also where a part does not end with a unit."""
    weights = [random(size, 33, seed=i) for i, size in enumerate(sizes)]
    builder, x, vectors = begun(33, sum(sizes))
    slot, first = builder.slot(sum(sizes)), 0
    for weight in weights:
        builder.product(library.pack(weight), x, slot, first=first)
        first += len(weight)
    builder.norm(None, slot, _OUT, sum(sizes))
    found = run(finished(builder, library, sum(sizes)))
    torch.testing.assert_close(found, vectors @ torch.cat(weights).T, rtol=1e-5, atol=1e-4)


def test_gates_that_are_multiplied_by_themselves(library: Library) -> None:
    gate, up = random(50, 33, seed=1), random(50, 33, seed=2)
    builder, x, vectors = begun(33, 50)
    slot = builder.slot(50)
    builder.product(library.pack(gate), x, slot)
    builder.product(library.pack(up), x, slot, "gate_stored", activation="gelu")
    builder.norm(None, slot, _OUT, 50)
    expected = gated_activation(vectors @ torch.cat((gate, up)).T, "gelu")
    torch.testing.assert_close(run(finished(builder, library, 50)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_embeddings(library: Library, dtype: torch.dtype, is_packed: bool) -> None:
    table, positions = random(_VOCAB, 21).to(dtype), random(_TOKENS + 5, 21, seed=1).to(dtype)
    builder = ProgramBuilder(21)
    x = builder.slot(21)
    builder.embed(library.pack(table) if is_packed else table, x, scale=3.0)
    builder.add_positions(positions, x, offset=2)
    builder.norm(None, x, _OUT, 21)
    expected = 3.0 * table[ids().long()].float() + positions[5:].float()
    torch.testing.assert_close(run(finished(builder, library, 21)), expected)


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("name", ["Q6_K", "NF4", "FP8 blocks", "GPTQ, desc_act"])
def test_quantized_embeddings(library: Library, name: str, rounds_inputs: bool) -> None:
    """Also those that are the output matrix, whose products round their inputs."""
    torch.manual_seed(0)
    weight = FORMATS[name](_VOCAB, 160)
    builder = ProgramBuilder(160)
    x = builder.slot(160)
    builder.embed(library.pack_quantized(weight, rounds_inputs=rounds_inputs), x)
    builder.norm(None, x, _OUT, 160)
    assert torch.equal(run(finished(builder, library, 160)), dequantized(weight)[ids().long()])


@pytest.mark.parametrize(("scale", "cap", "has_bias"), [(1.0, 0.0, True), (0.25, 0.0, False), (2.0, 3.0, True)])
@pytest.mark.parametrize("vocab_size", [1, 70, 128])
def test_logits(library: Library, scale: float, cap: float, has_bias: bool, vocab_size: int) -> None:
    weight, bias = random(vocab_size, 19), random(vocab_size, seed=1) if has_bias else None
    hidden = random(5, 19, seed=2)
    program = ProgramBuilder(19).build(library, library.pack(weight, bias), logit_scale=scale, logit_softcap=cap)
    expected = scale * functional.linear(hidden, weight, bias)
    if cap:
        expected = cap * torch.tanh(expected / cap)
    torch.testing.assert_close(program.logits(hidden), expected, rtol=1e-5, atol=1e-5)


def rotated(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """[T, H, D]; the first half of the rotated part with the second."""
    dim = cos_sin.shape[1]
    cos, sin = cos_sin[:, None].chunk(2, -1)
    a, b = heads[..., : dim // 2], heads[..., dim // 2 : dim]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, heads[..., dim:]), -1)


_NO_GROWTH = QueryGrowth()
_GROWTH = QueryGrowth(0.3, 8.0, 1)
_NORM_FORMS = ("none", "head", "own", "all", "weightless", "layer")


def head_norm(form: str, num_heads: int, seed: int) -> NormWeights | None:
    sizes = {"head": (_DIM,), "own": (num_heads, _DIM), "all": (num_heads * _DIM,), "layer": (num_heads, _DIM)}
    if form == "none":
        return None
    if form == "weightless":
        return NormWeights(None, 1e-5)
    return NormWeights(random(*sizes[form], seed=seed), 1e-5, "layer" if form == "layer" else "rms")


def normed(heads: Tensor, norm: NormWeights | None, spans_all: bool) -> Tensor:
    if norm is None:
        return heads
    if spans_all:
        return norm_cpu(heads.flatten(1), norm).view_as(heads)
    plain = norm_cpu(heads, norm._replace(weight=None))
    return plain if norm.weight is None else plain * norm.weight


@pytest.mark.parametrize("form", _NORM_FORMS)
@pytest.mark.parametrize("rotary_dim", [0, 10, 24])
@pytest.mark.parametrize(("follows", "growth"), [(False, _GROWTH), (True, _NO_GROWTH)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_heads(
    library: Library, form: str, rotary_dim: int, follows: bool, growth: QueryGrowth, page_size: int
) -> None:
    q_size, width = _Q_HEADS * _DIM, (_Q_HEADS + 2 * _KV_HEADS) * _DIM
    norms = QKNorms(head_norm(form, _Q_HEADS, 1), head_norm(form, _KV_HEADS, 2), form == "all", follows)
    builder, qkv, vectors = begun(width, width)
    rotary = 1 if rotary_dim else None
    builder.heads(qkv, HeadShape(_Q_HEADS, _KV_HEADS, _DIM), 0, norms, rotary, growth)
    builder.norm(None, qkv, _OUT, width)
    by_position, by_token = random(_TOKENS + 3, rotary_dim, seed=4), random(_TOKENS, 2)
    shape = (_VOCAB // page_size + 1, _KV_HEADS, page_size, _DIM)
    for dtype in (torch.float32, torch.bfloat16):
        pages = LayerPages(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), 0)
        tables = (RotaryTable(by_token, is_by_position=False), RotaryTable(by_position, is_by_position=True))
        out = run(finished(builder, library, width), NativePool([pages]), tables)
        q, k, v = vectors.view(_TOKENS, -1, _DIM).split([_Q_HEADS, _KV_HEADS, _KV_HEADS], 1)
        if not follows:
            q, k = normed(q, norms.q, norms.spans_all), normed(k, norms.k, norms.spans_all)
        if rotary is not None:
            q, k = rotated(q, by_position[3:]), rotated(k, by_position[3:])
        if follows:
            q, k = normed(q, norms.q, norms.spans_all), normed(k, norms.k, norms.spans_all)
        grown = 1 + growth.beta * torch.log(1 + ((torch.arange(3, 3 + _TOKENS) + growth.shift) / growth.length).floor())
        torch.testing.assert_close(out[:, :q_size], (q * grown[:, None, None]).flatten(1), rtol=1e-5, atol=1e-5)
        for stored, expected in ((pages.keys, k), (pages.values, v)):
            found = stored.transpose(1, 2).flatten(0, 1)[3 : 3 + _TOKENS]
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


class Layers:
    """Two layers of attention in two page groups, the second one with a window, on sequences that begin at once."""

    window, page_sizes = 9, (4, 8)

    def __init__(self, library: Library) -> None:
        width = (_Q_HEADS + 2 * _KV_HEADS) * _DIM
        q_size = _Q_HEADS * _DIM
        shape = HeadShape(_Q_HEADS, _KV_HEADS, _DIM)
        builder, x, _ = begun(width, q_size)
        qkv, attended = builder.slot(width), builder.slot(q_size)
        for layer, window in enumerate((None, self.window)):
            builder.norm(NormWeights(None, 1e-6), x, qkv, width)
            builder.heads(qkv, shape, layer, QKNorms(), layer, QueryGrowth())
            builder.attend(qkv, attended, shape, layer, scale=0.3, window=window)
            builder.product(library.pack(random(width, q_size, seed=7)), attended, x, "add", scale=0.1)
        builder.norm(None, attended, _OUT, q_size)
        self.program = builder.build(library, library.pack(random(31, q_size, seed=8)))
        self.tables = [random(60, _DIM, seed=9), random(60, 10, seed=10)]
        self.token_ids = torch.randint(_VOCAB, (5, 60), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        self.pages = []
        for group, size in enumerate(self.page_sizes):
            keys = torch.full((5 * 64 // size, _KV_HEADS, size, _DIM), torch.nan)
            self.pages.append(LayerPages(keys, keys.clone(), group))
        self.pool = NativePool(self.pages)
        self.page_tables = [
            torch.randperm(5 * 64 // size, generator=torch.Generator().manual_seed(size), dtype=torch.int32).view(5, -1)
            for size in self.page_sizes
        ]

    def forward(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        """[T, H] of (row, first position, number of positions)."""
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
        rows = torch.cat([torch.full((count,), row) for row, _, count in pieces])
        groups = []
        for size, table in zip(self.page_sizes, self.page_tables, strict=True):
            slots = table[rows, positions // size].long() * size + positions % size
            groups.append(GroupPages(slots, table[[row for row, _, _ in pieces]]))
        starts = [0, *itertools.accumulate(count for _, _, count in pieces)]
        return self.program.forward(
            torch.cat([self.token_ids[row, first : first + count] for row, first, count in pieces]),
            positions,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([first + count for _, first, count in pieces], dtype=torch.int32),
            groups,
            [RotaryTable(table[positions], is_by_position=False) for table in self.tables],
            self.pool,
        )


def test_page_groups_and_rotary_tables_of_their_own(library: Library) -> None:
    """The same bits from tables of rows as from tensors of tokens, though pages behind the window are gone."""
    world = Layers(library)
    rows, length = [3, 0, 4], 50
    whole = world.forward([(row, 0, length) for row in rows]).view(len(rows), length, -1)
    assert whole.isfinite().all()
    step = world.program.step(world.token_ids, world.page_tables, world.tables, world.pool)
    for pages in world.pages:
        pages.keys.fill_(torch.nan)
        pages.values.fill_(torch.nan)
    for first, count in ((0, 13), (13, 1), (14, 1), (15, 20), (35, 15)):
        behind = max(0, first - world.window + 1) // world.page_sizes[1]
        world.page_tables[1][:, :behind] = -(1 << 30)  # reading there ends the process
        starts, counts = (np.full(len(rows), value, dtype=np.int32) for value in (first, count))
        logits = step.compute(np.array(rows, dtype=np.int32), starts, counts, np.array([0, 2]))
        expected = world.program.logits(whole[[0, 2], first + count - 1])
        assert torch.equal(logits, expected)


def test_layers_see_their_own_options(library: Library) -> None:
    """The first layer against plain attention, by a program that ends there."""
    world = Layers(library)
    builder, x, _ = begun((_Q_HEADS + 2 * _KV_HEADS) * _DIM, _Q_HEADS * _DIM)
    shape, sinks = HeadShape(_Q_HEADS, _KV_HEADS, _DIM), random(_Q_HEADS, seed=5)
    builder.heads(x, shape, 1, QKNorms(), None, QueryGrowth())
    builder.attend(x, _OUT, shape, 1, scale=0.3, window=9, softcap=4.0, sinks=sinks)
    world.program = builder.build(library, library.pack(random(3, _Q_HEADS * _DIM)))
    found = world.forward([(2, 0, 40)]).view(40, _Q_HEADS, _DIM)
    vectors = random(_VOCAB, (_Q_HEADS + 2 * _KV_HEADS) * _DIM)[world.token_ids[2, :40].long()].view(40, -1, _DIM)
    q, k, v = vectors.transpose(0, 1).split([_Q_HEADS, _KV_HEADS, _KV_HEADS])
    k, v = (part.repeat_interleave(_Q_HEADS // _KV_HEADS, 0) for part in (k, v))
    scores = 4.0 * torch.tanh(0.3 * q @ k.transpose(1, 2) / 4.0)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    scores = scores.masked_fill((distance < 0) | (distance >= 9), -torch.inf)
    weights = torch.cat((scores, sinks[:, None, None].expand(-1, 40, 1)), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(found, (weights @ v).transpose(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize(("page_size", "dim"), [(1, 24), (16, 24), (4, 80), (16, 64)])
@pytest.mark.parametrize("scales", [None, KVScales(0.03, 0.002)])
def test_heads_are_quantized_as_the_reference_does(
    library: Library, name: str, page_size: int, dim: int, scales: KVScales | None
) -> None:
    """Of the same numbers, the same bytes: neither norms nor a rotation come before."""
    layout = PageLayout(KV_FORMATS[name], page_size, dim)
    width = (_Q_HEADS + 2 * _KV_HEADS) * dim
    builder, table = ProgramBuilder(width), random(_VOCAB, width)
    table[int(ids()[1])] *= 1e-5  # subnormal scales, and codes
    table[int(ids()[2])] *= 1e5
    vectors, qkv = table[ids().long()], builder.slot(width)
    builder.embed(table, qkv)
    builder.heads(qkv, HeadShape(_Q_HEADS, _KV_HEADS, dim), 0, QKNorms(), None, _NO_GROWTH, scales)
    builder.norm(None, qkv, _OUT, width)
    shape = (_VOCAB // page_size + 1, _KV_HEADS, layout.used_bytes + 6)
    keys, values = torch.zeros(2, *shape, dtype=torch.uint8).unbind(0)
    pages = LayerPages(keys, values, 0, layout)
    run(finished(builder, library, width), NativePool([pages]), ())
    cells = slot_cells(torch.arange(3, 3 + _TOKENS), _KV_HEADS, page_size)
    k, v = vectors.view(_TOKENS, -1, dim)[:, _Q_HEADS:].split(_KV_HEADS, 1)
    for stored, heads, scale in zip((pages.keys, pages.values), (k, v), scales or (None, None), strict=True):
        expected = torch.zeros_like(stored)
        write_quantized(expected, layout, cells, heads.reshape(-1, dim), scale)
        assert torch.equal(stored, expected)


def test_a_gap_between_q_and_k(library: Library) -> None:
    """What stands there is left alone, and the gates of an output are found there."""
    q, kv = _Q_HEADS * _DIM, 2 * _KV_HEADS * _DIM
    shape, found = HeadShape(_Q_HEADS, _KV_HEADS, _DIM), []
    table, gates = random(_VOCAB, q + kv), random(_VOCAB, q, seed=7)
    angles = RotaryTable(random(_VOCAB, _DIM, seed=3), is_by_position=True)
    for gap in (0, q):
        keys, values = torch.zeros(2, _VOCAB, _KV_HEADS, 1, _DIM)
        builder = ProgramBuilder(q)
        qkv, attended = builder.slot(q + gap + kv), builder.slot(q)
        builder.embed(torch.cat((table[:, :q], gates[:, :gap], table[:, q:]), 1), qkv)
        builder.heads(qkv, shape, 0, QKNorms(None, None), 0, QueryGrowth(), gap=gap)
        builder.attend(qkv, attended, shape, 0, scale=0.3)
        if gap:
            open_gates(builder, attended, Part(qkv, q), q)
        builder.norm(None, attended, _OUT, q)
        found.append(run(finished(builder, library, q), NativePool([LayerPages(keys, values, 0)]), (angles,)))
    torch.testing.assert_close(found[1], found[0] * gates[ids().long()].sigmoid(), rtol=1e-5, atol=1e-6)
