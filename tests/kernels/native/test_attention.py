"""The CPU's own attention: against a plain softmax in fp64, and bit for bit against itself in other batches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import (
    KV_FORMATS,
    KVFormat,
    PageLayout,
    dequantize,
    quantize,
    write_quantized,
)
from penstock.kernels.attention.paged_attention_cpu import first_seen
from penstock.kernels.native.library import Library
from tests.kernels.native.native_library import load_library, native_attention
from tests.kernels.pairs import every

Piece = tuple[int, int, int]
"""(sequence, first position, number of queries) of a batch's row."""
_LENS = (1, 17, 150, 70)


class Case(NamedTuple):
    """One layer's attention."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 0  # 0: as the keys
    values_in_keys: bool = False
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    pictures: tuple[tuple[int, int], ...] = ()  # first position, and the one behind, of those that see each other

    def last_seen(self, num_positions: int) -> Tensor:
        """int32, of each position the last one that it sees."""
        seen = torch.arange(num_positions, dtype=torch.int32)
        for first, behind in self.pictures:
            seen[first:behind] = min(behind, num_positions) - 1
        return seen


_CASES = {
    **{f"heads of {dim}": Case(head_dim=dim) for dim in (32, 80, 96, 112, 128, 192, 256, 512, 33)},
    "all options": Case(8, 2, 80, window=21, softcap=3.0, has_sinks=True),
    "softcap": Case(softcap=2.0),
    "sinks": Case(6, 1, has_sinks=True),
    "window": Case(window=65),
    "chunks": Case(window=-65),
    "chunks as long as a page": Case(window=-16, has_sinks=True, softcap=3.0),
    "a window of one": Case(window=1, has_sinks=True),
    "narrow values": Case(4, 4, 48, 20),
    "wide values": Case(4, 2, 24, 40, window=33, softcap=5.0),
    "latent": Case(20, 1, 576, 512, values_in_keys=True),
    "small latent": Case(3, 1, 25, 17, values_in_keys=True, softcap=4.0, has_sinks=True),
}

_ALIKE = [name for name, case in _CASES.items() if not case.value_dim and not case.head_dim % 2]
"""Those whose keys and values have the same, even size."""


class World:
    """Sequences with queries, and pages with their keys and values; what nobody may read is NaN."""

    def __init__(self, case: Case, page_size: int, kv_dtype: torch.dtype, format: KVFormat | None = None) -> None:
        def layout_of(page_size: int) -> PageLayout | None:
            return None if format is None else PageLayout(format, page_size, case.head_dim)

        generator = torch.Generator().manual_seed(3)
        value_dim = case.value_dim or case.head_dim
        heads = case.num_kv_heads
        self.case, self.page_size, self.scale = case, page_size, 1.5 * case.head_dim**-0.5
        self.q = [torch.randn(n, case.num_q_heads, case.head_dim, generator=generator) for n in _LENS]
        self.sinks = torch.randn(case.num_q_heads, generator=generator) * 3 if case.has_sinks else None
        self.keys = [torch.randn(n, heads, case.head_dim, generator=generator).to(kv_dtype) for n in _LENS]
        self.values = [torch.randn(n, heads, value_dim, generator=generator).to(kv_dtype) for n in _LENS]
        if case.values_in_keys:
            self.values = [keys[..., :value_dim] for keys in self.keys]
        width = -(-max(_LENS) // page_size) + 1
        order = torch.randperm(len(_LENS) * width, generator=generator, dtype=torch.int32)
        self.table = order.view(len(_LENS), width)
        self.k_pages = torch.full((len(order) + 1, heads, page_size, case.head_dim), torch.nan, dtype=kv_dtype)
        self.v_pages = torch.full((len(order) + 1, heads, page_size, value_dim), torch.nan, dtype=kv_dtype)
        self.value_dim, self.layout = value_dim, layout_of(page_size)
        if self.layout is not None:
            unused = 6  # bytes, where another group needs more
            shape = (len(order) + 1, heads, self.layout.used_bytes + unused)
            self.k_pages, self.v_pages = torch.full((2, *shape), 0x7F, dtype=torch.uint8).unbind(0)
        for pages, keys, values in zip(self.table, self.keys, self.values, strict=True):
            positions = torch.arange(len(keys))
            page, slot = pages[positions // page_size].long(), positions % page_size
            for stored, its in ((self.k_pages, keys), (self.v_pages, values)):
                if self.layout is None:
                    stored[page, :, slot] = its
                    continue
                cells = (page[:, None] * heads + torch.arange(heads)) * page_size + slot[:, None]
                write_quantized(stored, self.layout, cells.flatten(), its.flatten(0, 1))
                its[:] = dequantize(quantize(its, self.layout.format), self.layout.format, case.head_dim)

    def run(self, library: Library, batches: Sequence[Sequence[Piece]]) -> list[Tensor]:
        """What each sequence's queries find, [queries, Hq, Dv]."""
        found = [torch.empty(n, self.case.num_q_heads, self.value_dim) for n in _LENS]
        for pieces in batches:
            table = self.table[[s for s, _, _ in pieces]]
            for row, (_, first, count) in zip(table, pieces, strict=True):
                row[-(-(first + count) // self.page_size) :] = len(self.k_pages) - 1
                if self.case.window is not None:
                    row[: first_seen(first, self.case.window) // self.page_size] = len(self.k_pages) - 1
            starts = torch.tensor([0, *(count for _, _, count in pieces)]).cumsum(0).int()
            out = native_attention(
                library,
                torch.cat([self.q[s][first : first + count] for s, first, count in pieces]),
                self.k_pages,
                None if self.case.values_in_keys else self.v_pages,
                table,
                starts,
                torch.tensor([first + count for _, first, count in pieces], dtype=torch.int32),
                scale=self.scale,
                window=self.case.window,
                softcap=self.case.softcap,
                sinks=self.sinks,
                value_dim=self.value_dim,
                layout=self.layout,
                last_seen=self._last_seen(pieces) if self.case.pictures else None,
            )
            for (s, first, count), rows in zip(pieces, out.split([piece[2] for piece in pieces]), strict=True):
                found[s][first : first + count] = rows
        return found

    def _last_seen(self, pieces: Sequence[Piece]) -> Tensor:
        return torch.cat([self.case.last_seen(_LENS[s])[first : first + count] for s, first, count in pieces])

    def expected(self, sequence: int, *, rounds: bool = False) -> Tensor:
        """fp64 [queries, Hq, Dv]; `rounds`: queries are rounded to bf16 after scaling."""
        weights, values = self._weights(sequence, rounds), self._values(sequence)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def rounding(self, sequence: int) -> Tensor:
        """The same of the values' sizes: times 2**-8, what rounding of weights to bf16 can move the results by."""
        return torch.einsum("hqk,khd->qhd", self._weights(sequence, True), self._values(sequence).abs())

    def _values(self, sequence: int) -> Tensor:
        return self.values[sequence].double().repeat_interleave(self.case.num_q_heads // self.case.num_kv_heads, 1)

    def _weights(self, sequence: int, rounds: bool) -> Tensor:
        case = self.case
        keys = self.keys[sequence].double().repeat_interleave(case.num_q_heads // case.num_kv_heads, 1)
        queries = self.q[sequence].double() * self.scale
        if rounds:
            queries = (self.q[sequence] * self.scale).bfloat16().double()
        scores = torch.einsum("qhd,khd->hqk", queries, keys)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        positions = torch.arange(len(keys))
        firsts = torch.tensor([first_seen(position, case.window) for position in range(len(keys))])
        is_hidden = (positions > case.last_seen(len(keys))[:, None]) | (positions < firsts[:, None])
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, len(keys), 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., : len(keys)]


def whole() -> list[list[Piece]]:
    """Every sequence at once."""
    return [[(s, 0, n) for s, n in enumerate(_LENS)]]


def by_token() -> list[list[Piece]]:
    """Each step one query of each."""
    return [[(s, i, 1) for s, n in enumerate(_LENS) if i < n] for i in range(max(_LENS))]


def in_chunks() -> list[list[Piece]]:
    """One after the other, in chunks of 11."""
    return [[(s, i, min(11, n - i))] for s, n in enumerate(_LENS) for i in range(0, n, 11)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_like_a_plain_softmax_and_the_same_bits_in_any_batch(
    library: Library, case: Case, kv_dtype: torch.dtype
) -> None:
    """Where an instruction multiplies pairs of bf16, queries and weights are rounded to bf16, but not for latents.

    The expected results have rounded queries, too. Each weight is off by 2**-8 of itself at most (a bf16 has 8 bits of
    significand), so a result by as much of the sum of the weighted values' sizes.
    """
    world = World(case, 16, kv_dtype)
    found = world.run(library, whole())
    has_instruction = bool(library.functions.penstock_multiplies_pairs())
    rounds = has_instruction and kv_dtype == torch.bfloat16 and not case.values_in_keys
    for sequence, one in enumerate(found):
        expected = world.expected(sequence, rounds=rounds)
        bound = 3e-6 + 1e-5 * expected.abs() + (2**-8 * world.rounding(sequence) if rounds else 0)
        assert ((one.double() - expected).abs() <= bound).all(), ((one.double() - expected).abs() / bound).max()
    for page_size, batches in [(16, by_token), (16, in_chunks), (1, by_token), (64, in_chunks)]:
        for one, other in zip(World(case, page_size, kv_dtype).run(library, batches()), found, strict=True):
            assert torch.equal(one, other), (page_size, batches.__name__)


_QUANTIZED = [(case, KV_FORMATS[name]) for case, name in every(tuple(_ALIKE), tuple(KV_FORMATS))]


@pytest.mark.parametrize(("case", "format"), _QUANTIZED, ids=[f"{case}, {format.name}" for case, format in _QUANTIZED])
def test_quantized_pages(library: Library, case: str, format: KVFormat) -> None:
    """Like a plain softmax over the numbers that the pages hold, and the same bits in any batch.

    Integer products round queries and weights to 16 bits of their largest. A score is then off by
    |key|_1 * largest of the query * scale / 65534 at most, a weight by as much of itself; the sum over a block by its
    number of keys times the largest weighted value / 65534, were all errors to point the same way. Both are bounded
    here over all keys. fp8 is multiplied as floats.
    """
    world = World(_CASES[case], 16, torch.float32, format)
    found = world.run(library, whole())
    for sequence, one in enumerate(found):
        expected = world.expected(sequence)
        bound = torch.full_like(expected, 3e-6) + 1e-5 * expected.abs()
        if format.fp8 is None:
            bound = bound + rounding_bound(world, sequence)
        assert ((one.double() - expected).abs() <= bound).all(), ((one.double() - expected).abs() - bound).max()
    for page_size, batches in [(16, by_token), (16, in_chunks), (1, by_token), (8, in_chunks), (64, in_chunks)]:
        again = World(_CASES[case], page_size, torch.float32, format)
        for one, other in zip(again.run(library, batches()), found, strict=True):
            assert torch.equal(one, other), (page_size, batches.__name__)


def rounding_bound(world: World, sequence: int) -> Tensor:
    """fp64 [queries, Hq, 1], of the products of integers."""
    group = world.case.num_q_heads // world.case.num_kv_heads
    keys, values = (of[sequence].double().repeat_interleave(group, 1) for of in (world.keys, world.values))
    size = keys.abs().sum(-1).amax(0) * world.scale  # [Hq]
    if world.layout is not None and world.layout.format.has_groups:
        size = size * 3  # codes are larger than the numbers that they and a minimum make
    of_scores = world.q[sequence].double().abs().amax(-1) * size / 65534
    largest = values.abs().amax((0, 2)) * (3 if world.layout is not None and world.layout.format.has_groups else 1)
    bound: Tensor = largest * (2 * of_scores.expm1() + 64 / 65534)
    return bound[..., None]


@pytest.mark.parametrize("num_q_heads", [1, 2, 3, 7, 40, 128])
def test_heads_of_a_latent_are_shared_by_threads(num_q_heads: int) -> None:
    """However many threads there are, with the same bits."""
    world = World(Case(num_q_heads, 1, 96, 64, values_in_keys=True), 16, torch.bfloat16)
    expected = world.run(load_library(1), in_chunks())
    for num_threads in (2, 3, 16):
        for batches in (whole(), in_chunks()):
            for one, other in zip(world.run(load_library(num_threads), batches), expected, strict=True):
                assert torch.equal(one, other)


def test_large_scores_and_sinks_stay_finite(library: Library) -> None:
    """A sink far above or below all scores takes all of the mass, or nothing."""
    world = World(Case(2, 1, 32, has_sinks=True), 16, torch.float32)
    world.q = [q * 1e3 for q in world.q]
    for sink, share in [(-1e30, 1.0), (1e30, 0.0)]:
        world.sinks = torch.full((2,), sink)
        for sequence, one in enumerate(world.run(library, whole())):
            torch.testing.assert_close(one.double(), world.expected(sequence), rtol=2e-3, atol=2e-3)
            if not share:
                assert not one.any()


@pytest.mark.parametrize("format", [None, KV_FORMATS["int8"]], ids=["plain", "int8"])
@pytest.mark.parametrize("window", [None, 5, 33])
def test_positions_of_a_picture_see_each_other(library: Library, window: int | None, format: KVFormat | None) -> None:
    cuts = (0, 7, 20, 60, 75, 100, 140, 150)  # of chunks: none within a picture
    world = World(
        Case(window=window, has_sinks=True, pictures=((20, 60), (60, 70), (100, 140))), 16, torch.float32, format
    )
    found = world.run(library, whole())
    for sequence, one in enumerate(found if format is None else ()):
        torch.testing.assert_close(one.double(), world.expected(sequence), rtol=1e-5, atol=3e-6)
    pieces = [[(s, a, min(b, n) - a)] for s, n in enumerate(_LENS) for a, b in pairwise(cuts) if a < n]
    for one, again in zip(found, world.run(library, pieces), strict=True):
        assert torch.equal(one, again)
