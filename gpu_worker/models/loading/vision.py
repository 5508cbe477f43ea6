"""From a checkpoint to a vision tower."""

import torch
from torch import Tensor

from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.vision.grid import GridTower, Merger
from penstock.gpu_worker.models.vision.patches import PatchTower, SquareMergeBlock
from penstock.gpu_worker.models.vision.tiles import TilePoolBlock, TileSquaresBlock, TileTower
from penstock.gpu_worker.models.vision.tower import Matrix, PatchMLPBlock, Tower, TowerLayer, TowerNorm
from penstock.models.vision.foreign import ForeignVision
from penstock.models.vision.grid import GRID_PREFIX, GridVision
from penstock.models.vision.kinds import Vision
from penstock.models.vision.patches import PatchVision
from penstock.models.vision.tiles import (
    NEWLINE,
    POOL_MATRIX,
    POOL_NORM,
    SQUARES_MATRIX,
    TilePool,
    TileSquares,
    TileVision,
)
from penstock.models.vision.tower import PROJECTOR_PREFIX, TOWER_PREFIX, PatchMLP
from penstock.models.weights.sources import Source


def read_tower(vision: Vision, reader: WeightReader) -> Tower:
    """The tower, with its weights as floats."""
    reader = reader._replace(library=None, are_packed=False)
    match vision:
        case GridVision():
            return _grid_tower(vision, reader)
        case TileVision():
            return _tile_tower(vision, reader)
        case PatchVision():
            return _patch_tower(vision, reader)
        case ForeignVision():
            from penstock.gpu_worker.models.vision.foreign import foreign_tower  # seconds, and most models need it not

            return foreign_tower(vision, reader.checkpoint, reader.dtype, reader.device)


class _Reader:
    """Reads a tower's weights by their names."""

    def __init__(self, vision: Vision, prefix: str, reader: WeightReader) -> None:
        self._shapes, self._prefix, self._reader, self._eps = vision.tensors, prefix, reader, vision.norm_eps

    def tensor(self, *names: str) -> Tensor:
        """One tensor, or several, stacked."""
        names = tuple(self._prefix + name for name in names)
        return self._reader.tensor(Source(names, tuple(self._shapes[name] for name in names)))

    def if_there(self, *names: str) -> Tensor | None:
        """As `tensor`; None if the tower does not have the first of these."""
        return self.tensor(*names) if self._prefix + names[0] in self._shapes else None

    def matrix(self, *names: str) -> Matrix:
        """One matrix with the outputs of all named matrices."""
        weights, biases = ([f"{name}.{kind}" for name in names] for kind in ("weight", "bias"))
        return Matrix(self.tensor(*weights).flatten(1), self.if_there(*biases))

    def norm(self, name: str) -> TowerNorm:
        return TowerNorm(self.tensor(f"{name}.weight"), self.if_there(f"{name}.bias"), self._eps)


def _grid_tower(vision: GridVision, reader: WeightReader) -> GridTower:
    its = _Reader(vision, GRID_PREFIX, reader)

    def layer(i: int) -> TowerLayer:
        name = f"blocks.{i}."
        return TowerLayer(
            its.norm(f"{name}norm1"),
            its.matrix(f"{name}attn.qkv"),
            its.matrix(f"{name}attn.proj"),
            its.norm(f"{name}norm2"),
            tuple(its.matrix(name + part) for part in vision.names.mlp),
        )

    def merger(name: str) -> Merger:
        norm, first, second = vision.names.merger
        return Merger(its.norm(name + norm), its.matrix(name + first), its.matrix(name + second))

    return GridTower(
        vision,
        its.matrix("patch_embed.proj"),
        its.if_there("pos_embed.weight"),
        tuple(layer(i) for i in range(vision.num_layers)),
        merger("merger."),
        tuple(merger(f"deepstack_merger_list.{i}.") for i in range(len(vision.deep_layers))),
    )


def _tile_tower(vision: TileVision, reader: WeightReader) -> TileTower:
    its, others = _Reader(vision, TOWER_PREFIX, reader), _Reader(vision, "", reader)

    def layer(i: int) -> TowerLayer:
        name = f"encoder.layers.{i}."
        return TowerLayer(
            its.norm(f"{name}layer_norm1"),
            its.matrix(*(f"{name}self_attn.{part}_proj" for part in "qkv")),
            its.matrix(f"{name}self_attn.out_proj"),
            its.norm(f"{name}layer_norm2"),
            (its.matrix(f"{name}mlp.fc1"), its.matrix(f"{name}mlp.fc2")),
        )

    positions = its.tensor("embeddings.position_embedding.weight")
    return TileTower(
        vision,
        its.matrix("embeddings.patch_embedding"),
        its.if_there("embeddings.class_embedding"),
        positions_by_share(positions, vision.tile // vision.patch) if vision.shares_positions else positions,
        its.norm("pre_layrnorm") if vision.has_class else None,
        tuple(layer(i) for i in range(vision.num_layers)),
        its.norm("post_layernorm") if vision.has_last_norm else None,
        _made(vision, others),
        others.if_there(NEWLINE),
    )


def positions_by_share(table: Tensor, side: int) -> Tensor:
    """[side * side, hidden]: each patch's learned vector, found by its relative position as Idefics3 computes it.

    That arithmetic rounds, so some patches share a vector.
    """
    shares = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1 - 1e-6)
    nearest = torch.bucketize(shares, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return table[(nearest[:, None] * side + nearest).flatten().to(table.device)]


def _made(vision: TileVision, its: _Reader) -> PatchMLPBlock | TilePoolBlock | TileSquaresBlock:
    made = vision.made
    if isinstance(made, TilePool):
        norm = its.norm(POOL_NORM)
        norm = norm._replace(weight=norm.weight.float() + 1.0)  # stored as w - 1
        return TilePoolBlock(made.side, norm, Matrix(its.tensor(POOL_MATRIX).T.contiguous(), None))
    if isinstance(made, TileSquares):
        return TileSquaresBlock(made.square, its.matrix(SQUARES_MATRIX))
    return _mlp(made, its)


def _mlp(made: PatchMLP, its: _Reader) -> PatchMLPBlock:
    first, second = (its.matrix(f"{PROJECTOR_PREFIX}linear_{i}") for i in (1, 2))
    return PatchMLPBlock(first, second, made.activation)


def _patch_tower(vision: PatchVision, reader: WeightReader) -> PatchTower:
    its, others = _Reader(vision, TOWER_PREFIX, reader), _Reader(vision, "", reader)

    def layer(i: int) -> TowerLayer:
        name = f"transformer.layers.{i}."
        return TowerLayer(
            its.norm(f"{name}attention_norm"),
            its.matrix(*(f"{name}attention.{part}_proj" for part in "qkv")),
            its.matrix(f"{name}attention.o_proj"),
            its.norm(f"{name}ffn_norm"),
            tuple(its.matrix(f"{name}feed_forward.{part}_proj") for part in ("gate", "up", "down")),
        )

    merge = None
    if vision.merge is not None:
        norm = others.norm(f"{PROJECTOR_PREFIX}norm")._replace(eps=vision.merge.norm_eps)
        matrix = others.matrix(f"{PROJECTOR_PREFIX}patch_merger.merging_layer")
        merge = SquareMergeBlock(vision.merge.square, norm, matrix)
    return PatchTower(
        vision,
        its.matrix("patch_conv"),
        its.norm("ln_pre"),
        tuple(layer(i) for i in range(vision.num_layers)),
        merge,
        _mlp(vision.made, others),
    )
