"""The CPU's own indexer: the positions with the highest scores, and the same ones and the same bits in any batch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.native.attention.latents import NativeIndexer, PackedLatents
from penstock.kernels.native.library import Library
from tests.kernels.native.native_library import load_library, native_choice, native_latent_attention
from tests.kernels.native.test_latent import Piece, by_token, in_chunks, rotated, whole

_LENS = (1, 17, 100, 70)
_HEADS, _RANK, _NOPE, _ROPE, _VALUE = 3, 32, 16, 8, 16
_SCALE = (_NOPE + _ROPE) ** -0.5


class World:
    """Sequences, the pages for them, a layer's weights, and its indexer."""

    def __init__(self, num_heads: int, dim: int, top_k: int, kv_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(9)

        def random(*shape: int) -> Tensor:
            return torch.empty(shape).normal_(generator=generator)

        self.num_heads, self.dim, self.top_k, self.kv_dtype = num_heads, dim, top_k, kv_dtype
        self.kv_b, self.norm = random(_HEADS * (_NOPE + _VALUE), _RANK) / 6, 1 + 0.1 * random(_RANK)
        self.index_norm, self.index_bias = 1 + 0.1 * random(dim), 0.1 * random(dim)
        self.new = [random(n, _RANK + _ROPE) for n in _LENS]
        self.q = [random(n, _HEADS, _NOPE + _ROPE) for n in _LENS]
        self.index_k = [random(n, dim) for n in _LENS]
        self.index_q = [random(n, num_heads, dim) for n in _LENS]
        self.weights = [random(n, num_heads) for n in _LENS]
        angles = random(max(_LENS), _ROPE // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    def run(self, library: Library, batches: list[list[Piece]], page_size: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each sequence, the positions that were chosen and what the queries found."""
        indexer = NativeIndexer(
            *(self.index_norm, self.index_bias, 1e-6),
            num_heads=self.num_heads,
            rope_dim=_ROPE,
            top_k=self.top_k,
            first=_RANK + _ROPE,
        )
        latents = PackedLatents(
            *(library, self.kv_b, self.norm, 1e-5),
            num_heads=_HEADS,
            nope_dim=_NOPE,
            rope_dim=_ROPE,
            page_size=page_size,
            scale=_SCALE,
            index_dim=self.dim,
            top_k=self.top_k,
        )
        width = -(-max(_LENS) // page_size)
        table = torch.randperm(len(_LENS) * width, dtype=torch.int32).view(len(_LENS), width)
        shape = (table.numel(), 1, page_size, _RANK + _ROPE + self.dim)
        pages = torch.full(shape, torch.nan, dtype=self.kv_dtype)
        chosen = [torch.empty(n, self.top_k, dtype=torch.int32) for n in _LENS]
        found = [torch.empty(n, _HEADS, _VALUE) for n in _LENS]
        for pieces in batches:
            ranges = [(s, slice(first, first + count)) for s, first, count in pieces]
            positions = [torch.arange(its.start, its.stop) for _, its in ranges]
            slots = [
                table[s, of // page_size].long() * page_size + of % page_size
                for (s, _), of in zip(ranges, positions, strict=True)
            ]
            common = (
                table[[s for s, _ in ranges]],
                torch.tensor([0, *(count for _, _, count in pieces)]).cumsum(0).int(),
                torch.tensor([its.stop for _, its in ranges], dtype=torch.int32),
                torch.cat(slots),
                self.cos_sin[torch.cat(positions)],
            )
            index = (torch.cat([of[s][its] for s, its in ranges]) for of in (self.index_k, self.index_q, self.weights))
            places = native_choice(library, indexer, pages, *common, *index)
            of_latents = (torch.cat([of[s][its] for s, its in ranges]) for of in (self.new, self.q))
            out = native_latent_attention(library, latents, pages, *common, *of_latents)
            counts = [count for _, _, count in pieces]
            for (s, its), one, other in zip(ranges, places.split(counts), out.split(counts), strict=True):
                chosen[s][its], found[s][its] = one, other
        return chosen, found

    def expected(self, sequence: int) -> list[set[int]]:
        """The positions of each token that sees more than `top_k`, by scores in fp64."""
        n, angles = _LENS[sequence], self.cos_sin[: _LENS[sequence]].double()

        def turned(x: Tensor) -> Tensor:
            return torch.cat((rotated(x[..., :_ROPE], angles), x[..., _ROPE:]), -1)

        weight, bias = self.index_norm.double(), self.index_bias.double()
        keys = turned(functional.layer_norm(self.index_k[sequence].double(), (self.dim,), weight, bias, 1e-6))
        keys = keys.to(self.kv_dtype).double()
        of_heads = torch.relu(torch.einsum("qhd,kd->qhk", turned(self.index_q[sequence].double()), keys))
        scores = torch.einsum("qhk,qh->qk", of_heads, self.weights[sequence].double())
        return [set(scores[t, : t + 1].topk(self.top_k).indices.tolist()) for t in range(self.top_k, n)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "dim", "top_k"), [(8, 16, 5), (13, 40, 16), (64, 128, 20)])
def test_the_highest_scores_and_the_same_bits_in_any_batch(
    library: Library, num_heads: int, dim: int, top_k: int, kv_dtype: torch.dtype
) -> None:
    world = World(num_heads, dim, top_k, kv_dtype)
    chosen, found = world.run(library, whole(), 16)
    for sequence, places in enumerate(chosen):
        for t, expected in enumerate(world.expected(sequence), top_k):
            assert places[t].tolist() == sorted(expected), (sequence, t)
    for batches, page_size in ((by_token(), 16), (in_chunks(), 1), (whole(), 64)):
        others = world.run(library, batches, page_size)
        for one, other in zip((*chosen, *found), (*others[0], *others[1]), strict=True):
            assert torch.equal(one, other)


def test_attention_reads_what_was_chosen(library: Library) -> None:
    """The same as with every other position hidden."""
    world = World(8, 16, 7, torch.float32)
    chosen, found = world.run(library, whole(), 16)
    s = 2
    latent, key = world.new[s].double().split([_RANK, _ROPE], -1)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-5) * world.norm.double()
    angles = world.cos_sin[: _LENS[s]].double()
    keys, values = (latent @ world.kv_b.double().T).view(_LENS[s], _HEADS, -1).split([_NOPE, _VALUE], -1)
    plain, turned = world.q[s].double().split([_NOPE, _ROPE], -1)
    scores = torch.einsum("qhd,khd->hqk", plain, keys)
    scores += torch.einsum("qhd,kd->hqk", rotated(turned, angles), rotated(key, angles))
    seen = torch.ones(_LENS[s], _LENS[s], dtype=torch.bool).tril()
    seen[7:] = torch.zeros(_LENS[s] - 7, _LENS[s], dtype=torch.bool).scatter_(1, chosen[s][7:].long(), True)
    weights = (scores * _SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(found[s].double(), torch.einsum("hqk,khd->qhd", weights, values), rtol=1e-5, atol=1e-5)


def test_equal_scores_choose_the_earliest(library: Library) -> None:
    world = World(8, 16, 6, torch.float32)
    world.weights = [torch.zeros_like(weights) for weights in world.weights]
    chosen, _ = world.run(library, whole(), 16)
    assert chosen[2][6:].eq(torch.arange(6)).all()
