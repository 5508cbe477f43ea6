"""From a checkpoint to a vision tower."""

from penstock.core.checkpoint.vision import VISION_PREFIX, Vision, vision_tensors
from penstock.core.checkpoint.weight_sources import Source
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.vision.tower import Matrix, Merger, Tower, TowerLayer, TowerNorm


def read_tower(vision: Vision, reader: WeightReader) -> Tower:
    """The tower, with its weights as floats."""
    shapes = vision_tensors(vision)
    reader = reader._replace(library=None, are_packed=False)

    def matrix(name: str) -> Matrix:
        weight, bias = (f"{VISION_PREFIX}{name}.{kind}" for kind in ("weight", "bias"))
        return Matrix(
            reader.tensor(Source((weight,), (shapes[weight],))).flatten(1),
            reader.tensor(Source((bias,), (shapes[bias],))) if bias in shapes else None,
        )

    def norm(name: str) -> TowerNorm:
        weight, bias = (f"{VISION_PREFIX}{name}.{kind}" for kind in ("weight", "bias"))
        return TowerNorm(
            reader.tensor(Source((weight,), (shapes[weight],))),
            reader.tensor(Source((bias,), (shapes[bias],))) if bias in shapes else None,
            vision.norm_eps,
        )

    def layer(i: int) -> TowerLayer:
        name = f"blocks.{i}."
        return TowerLayer(
            norm(f"{name}norm1"),
            matrix(f"{name}attn.qkv"),
            matrix(f"{name}attn.proj"),
            norm(f"{name}norm2"),
            tuple(matrix(name + its) for its in vision.names.mlp),
        )

    def merger(name: str) -> Merger:
        its_norm, first, second = vision.names.merger
        return Merger(norm(name + its_norm), matrix(name + first), matrix(name + second))

    positions = f"{VISION_PREFIX}pos_embed.weight"
    return Tower(
        vision,
        matrix("patch_embed.proj"),
        reader.tensor(Source((positions,), (shapes[positions],))) if vision.positions else None,
        tuple(layer(i) for i in range(vision.num_layers)),
        merger("merger."),
        tuple(merger(f"deepstack_merger_list.{i}.") for i in range(len(vision.deep_layers))),
    )
