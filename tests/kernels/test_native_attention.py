"""The CPU's own attention: against a plain softmax in fp64, and bit for bit against itself in other batches."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from tests.kernels.native_library import load_library, native_attention

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


_CASES = {
    **{f"heads of {dim}": Case(head_dim=dim) for dim in (32, 80, 96, 112, 128, 192, 256, 33)},
    "all options": Case(8, 2, 80, window=21, softcap=3.0, has_sinks=True),
    "softcap": Case(softcap=2.0),
    "sinks": Case(6, 1, has_sinks=True),
    "window": Case(window=65),
    "a window of one": Case(window=1, has_sinks=True),
    "narrow values": Case(4, 4, 48, 20),
    "wide values": Case(4, 2, 24, 40, window=33, softcap=5.0),
    "latent": Case(20, 1, 576, 512, values_in_keys=True),
    "small latent": Case(3, 1, 25, 17, values_in_keys=True, softcap=4.0, has_sinks=True),
}


class World:
    """Sequences with queries, and pages with their keys and values; what nobody may read is NaN."""

    def __init__(self, case: Case, page_size: int, kv_dtype: torch.dtype) -> None:
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
        for pages, keys, values in zip(self.table, self.keys, self.values, strict=True):
            for position in range(len(keys)):
                page, slot = pages[position // page_size], position % page_size
                self.k_pages[page, :, slot], self.v_pages[page, :, slot] = keys[position], values[position]

    def run(self, library: Library, batches: Sequence[Sequence[Piece]]) -> list[Tensor]:
        """What each sequence's queries find, [queries, Hq, Dv]."""
        found = [torch.empty(n, self.case.num_q_heads, self.v_pages.shape[3]) for n in _LENS]
        for pieces in batches:
            table = self.table[[s for s, _, _ in pieces]]
            for row, (_, first, count) in zip(table, pieces, strict=True):
                row[-(-(first + count) // self.page_size) :] = len(self.k_pages) - 1
                if self.case.window is not None:
                    row[: max(0, first - self.case.window + 1) // self.page_size] = len(self.k_pages) - 1
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
                value_dim=self.v_pages.shape[3],
            )
            for (s, first, count), rows in zip(pieces, out.split([piece[2] for piece in pieces]), strict=True):
                found[s][first : first + count] = rows
        return found

    def expected(self, sequence: int) -> Tensor:
        """fp64 [queries, Hq, Dv]"""
        case, group = self.case, self.case.num_q_heads // self.case.num_kv_heads
        keys, values = (of[sequence].double().repeat_interleave(group, 1) for of in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.q[sequence].double(), keys) * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        positions = torch.arange(len(keys))
        distance = positions[:, None] - positions
        is_hidden = (distance < 0) | (distance >= (case.window or len(keys)))
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, len(keys), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)


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
    world = World(case, 16, kv_dtype)
    found = world.run(library, whole())
    for sequence, one in enumerate(found):
        torch.testing.assert_close(one.double(), world.expected(sequence), rtol=1e-5, atol=3e-6)
    for page_size, batches in [(16, by_token), (16, in_chunks), (1, by_token), (64, in_chunks)]:
        for one, other in zip(World(case, page_size, kv_dtype).run(library, batches()), found, strict=True):
            assert torch.equal(one, other), (page_size, batches.__name__)


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
