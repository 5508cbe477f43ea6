"""The CPU's own latent attention: against its definition in fp64, and bit for bit against itself in other batches."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.attention.latents import PackedLatents
from penstock.kernels.native.library import Library
from tests.kernels.native.native_library import load_library, native_latent_attention

_LENS = (1, 17, 100, 70)
_EPS = 1e-5
Piece = tuple[int, int, int]
"""(sequence, first position, number of queries) of a batch's row."""


class Case(NamedTuple):
    """One layer's sizes."""

    num_heads: int = 4
    kv_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 8
    v_dim: int = 16


_CASES = {
    "tiny": Case(),
    "DeepSeek-V2-Lite": Case(16, 512, 128, 64, 128),
    "several parts": Case(128, 64, 32, 16, 32),
    "sizes that fill no vector": Case(3, 37, 11, 6, 21),
    "wide values": Case(5, 80, 24, 16, 48),
}


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """[T, ..., rope_dim], in halves."""
    cos, sin = (half.view(len(x), *[1] * (x.ndim - 2), -1) for half in cos_sin.chunk(2, -1))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class World:
    """Sequences, the pages for them, and a layer's weights."""

    def __init__(self, case: Case, page_size: int = 16, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(6)

        def random(*shape: int) -> Tensor:
            return torch.empty(shape).normal_(generator=generator)

        num_outputs = case.num_heads * (case.nope_dim + case.v_dim)
        self.case, self.page_size, self.kv_dtype = case, page_size, kv_dtype
        self.scale = (case.nope_dim + case.rope_dim) ** -0.5
        self.kv_b = (random(num_outputs, case.kv_rank) * case.kv_rank**-0.5).to(dtype)
        self.norm = 1 + 0.1 * random(case.kv_rank)
        self.new = [random(n, case.kv_rank + case.rope_dim) for n in _LENS]
        self.q = [random(n, case.num_heads, case.nope_dim + case.rope_dim) for n in _LENS]
        angles = random(max(_LENS), case.rope_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        width = -(-max(_LENS) // page_size)
        self.table = torch.randperm(len(_LENS) * width, generator=generator, dtype=torch.int32).view(len(_LENS), width)

    def run(self, library: Library, batches: Sequence[Sequence[Piece]], *, rounds_inputs: bool = False) -> list[Tensor]:
        """What each sequence's queries find, [queries, Hq, v_dim]; positions are kept as they come."""
        case = self.case
        latents = PackedLatents(
            library,
            self.kv_b,
            self.norm,
            _EPS,
            num_heads=case.num_heads,
            nope_dim=case.nope_dim,
            rope_dim=case.rope_dim,
            page_size=self.page_size,
            scale=self.scale,
            rounds_inputs=rounds_inputs,
        )
        shape = (self.table.numel(), 1, self.page_size, case.kv_rank + case.rope_dim)
        self.pages = torch.full(shape, torch.nan, dtype=self.kv_dtype)
        found = [torch.empty(n, case.num_heads, case.v_dim) for n in _LENS]
        for pieces in batches:
            ranges = [(s, slice(first, first + count)) for s, first, count in pieces]
            positions = [torch.arange(first, first + count) for _, first, count in pieces]
            slots = [
                self.table[s, of // self.page_size].long() * self.page_size + of % self.page_size
                for (s, _, _), of in zip(pieces, positions, strict=True)
            ]
            out = native_latent_attention(
                library,
                latents,
                self.pages,
                self.table[[s for s, _, _ in pieces]],
                torch.tensor([0, *(count for _, _, count in pieces)]).cumsum(0).int(),
                torch.tensor([first + count for _, first, count in pieces], dtype=torch.int32),
                torch.cat(slots),
                self.cos_sin[torch.cat(positions)],
                torch.cat([self.new[s][tokens] for s, tokens in ranges]),
                torch.cat([self.q[s][tokens] for s, tokens in ranges]),
            )
            for (s, tokens), rows in zip(ranges, out.split([piece[2] for piece in pieces]), strict=True):
                found[s][tokens] = rows
        return found

    def kept(self, sequence: int) -> Tensor:
        """fp64 [positions, kv_rank + rope_dim], rounded as the pages are."""
        latent, key = self.new[sequence].double().split([self.case.kv_rank, self.case.rope_dim], -1)
        latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + _EPS) * self.norm.double()
        angles = self.cos_sin[: len(latent)].double()
        return torch.cat((latent, rotated(key, angles)), -1).to(self.kv_dtype).double()

    def expected(self, sequence: int) -> Tensor:
        """fp64 [queries, Hq, v_dim]: every head has its keys and values."""
        case = self.case
        latent, rotated_key = self.kept(sequence).split([case.kv_rank, case.rope_dim], -1)
        kv = (latent @ self.kv_b.double().T).view(len(latent), case.num_heads, -1)
        keys, values = kv.split([case.nope_dim, case.v_dim], -1)
        plain, turned = self.q[sequence].double().split([case.nope_dim, case.rope_dim], -1)
        turned = rotated(turned, self.cos_sin[: len(latent)].double())
        scores = torch.einsum("qhd,khd->hqk", plain, keys) + torch.einsum("qhd,kd->hqk", turned, rotated_key)
        is_hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = (scores * self.scale).masked_fill(is_hidden, -torch.inf).softmax(-1)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_like_each_heads_keys_and_values(
    library: Library, case: Case, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    world = World(case, dtype=dtype, kv_dtype=kv_dtype)
    # A sum that is rounded to bf16 may be the next number to the exact one's.
    tolerance = 1e-5 if kv_dtype == torch.float32 else 2e-3
    for sequence, one in enumerate(world.run(library, whole())):
        torch.testing.assert_close(one.double(), world.expected(sequence), rtol=tolerance, atol=tolerance)
        pages = world.pages[world.table[sequence].long(), 0].flatten(0, 1)[: len(one)]
        torch.testing.assert_close(pages.double(), world.kept(sequence), rtol=max(1e-5, tolerance * 4), atol=1e-5)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16, rounded inputs"])
@pytest.mark.parametrize("name", ["tiny", "several parts", "sizes that fill no vector"])
def test_the_same_bits_in_any_batch(library: Library, name: str, kind: str) -> None:
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    rounds_inputs = kind.endswith("rounded inputs")
    found = World(_CASES[name], dtype=dtype, kv_dtype=dtype).run(library, whole(), rounds_inputs=rounds_inputs)
    for page_size, batches in [(16, by_token), (1, in_chunks), (64, whole)]:
        world = World(_CASES[name], page_size, dtype=dtype, kv_dtype=dtype)
        for one, other in zip(world.run(library, batches(), rounds_inputs=rounds_inputs), found, strict=True):
            assert torch.equal(one, other), (page_size, batches.__name__)


def test_a_negative_slot_keeps_nothing(library: Library) -> None:
    world = World(_CASES["tiny"], dtype=torch.float32, kv_dtype=torch.float32)
    world.run(library, whole())
    before = world.pages.clone()
    case = world.case
    latents = PackedLatents(
        library,
        world.kv_b,
        world.norm,
        _EPS,
        num_heads=case.num_heads,
        nope_dim=case.nope_dim,
        rope_dim=case.rope_dim,
        page_size=16,
        scale=1.0,
    )
    row = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    slots, new, q = torch.tensor([-1]), torch.ones_like(world.new[0]), world.q[0]
    native_latent_attention(library, latents, world.pages, world.table, *row, slots, world.cos_sin[:1], new, q)
    assert torch.equal(before.nan_to_num(), world.pages.nan_to_num())
