"""From a checkpoint to a vision tower."""

from torch import Tensor

from penstock.core.checkpoint.tile_vision import NEWLINE, POOL_MATRIX, POOL_NORM, TOWER_PREFIX, TilePool, TileVision
from penstock.core.checkpoint.vision import GRID_PREFIX, Vision
from penstock.core.checkpoint.weight_sources import Source
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.vision.grid import GridTower, Merger
from penstock.gpu_worker.models.vision.tiles import TileMLPBlock, TilePoolBlock, TileTower
from penstock.gpu_worker.models.vision.tower import Matrix, Tower, TowerLayer, TowerNorm


def read_tower(vision: Vision | TileVision, reader: WeightReader) -> Tower:
    """The tower, with its weights as floats."""
    reader = reader._replace(library=None, are_packed=False)
    return _grid_tower(vision, reader) if isinstance(vision, Vision) else _tile_tower(vision, reader)


class _Reader:
    """Reads a tower's weights by their names."""

    def __init__(self, vision: Vision | TileVision, prefix: str, reader: WeightReader) -> None:
        self._shapes, self._prefix, self._reader, self._eps = vision.tensors, prefix, reader, vision.norm_eps

    def tensor(self, *names: str) -> Tensor:
        """One of them, or several, stacked."""
        names = tuple(self._prefix + name for name in names)
        return self._reader.tensor(Source(names, tuple(self._shapes[name] for name in names)))

    def if_there(self, *names: str) -> Tensor | None:
        """The same, if it has them."""
        return self.tensor(*names) if self._prefix + names[0] in self._shapes else None

    def matrix(self, *names: str) -> Matrix:
        """Of the outputs of all that are named."""
        weights, biases = ([f"{name}.{kind}" for name in names] for kind in ("weight", "bias"))
        return Matrix(self.tensor(*weights).flatten(1), self.if_there(*biases))

    def norm(self, name: str) -> TowerNorm:
        return TowerNorm(self.tensor(f"{name}.weight"), self.if_there(f"{name}.bias"), self._eps)


def _grid_tower(vision: Vision, reader: WeightReader) -> GridTower:
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

    return TileTower(
        vision,
        its.matrix("embeddings.patch_embedding"),
        its.if_there("embeddings.class_embedding"),
        its.tensor("embeddings.position_embedding.weight"),
        its.norm("pre_layrnorm") if vision.has_class else None,
        tuple(layer(i) for i in range(vision.num_layers)),
        its.norm("post_layernorm") if vision.has_last_norm else None,
        _made(vision, others),
        others.if_there(NEWLINE),
    )


def _made(vision: TileVision, its: _Reader) -> TileMLPBlock | TilePoolBlock:
    made = vision.made
    if isinstance(made, TilePool):
        norm = its.norm(POOL_NORM)
        norm = norm._replace(weight=norm.weight.float() + 1.0)  # what is stored is its distance from 1
        return TilePoolBlock(made.side, norm, Matrix(its.tensor(POOL_MATRIX).T.contiguous(), None))
    first, second = (its.matrix(f"multi_modal_projector.linear_{i}") for i in (1, 2))
    return TileMLPBlock(first, second, made.activation)
