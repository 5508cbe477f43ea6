"""Float weights that are quantized as they are read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.gpu_worker.formats.made import made
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.description.model_config import ModelConfig
from penstock.models.quantization import products_of, recipes_of
from penstock.models.weights.sources import Cut, Ranges


class Maker:
    """Quantizes each matrix, or a rank's part of it, to the same numbers as in the whole matrix.

    If an output has one scale and ranks have parts of its inputs, the ranks exchange the largest values of their parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str, Sequence[Ranges | None]], Tensor],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """
        Args:
            config: of the whole model.
            read: reads some ranges of each axis of a tensor; no ranges: all of it.
            ranks: the ranks that make parts of the same matrices at the same time.
            device: where the ranks exchange tensors.
        """
        self._recipes, self._products = recipes_of(config), products_of(config)
        self._read, self._ranks, self._device = read, ranks, device

    def __call__(self, name: str, cut: Cut) -> QuantizedWeight | None:
        """The matrix [N, K], or [E, N, K] for experts in one tensor; None if it is not quantized."""
        if name not in self._recipes:
            return None
        recipe, product = self._recipes[name], self._products[name]
        num_inputs, inputs = product.shape[-1], cut.inputs
        begin, end = (0, num_inputs) if inputs is None else inputs[0]
        first = begin
        if inputs is not None and recipe.format == "int4":  # extend to whole groups
            first, last = begin // recipe.group * recipe.group, min(-(-end // recipe.group) * recipe.group, num_inputs)
            inputs = ((first, last),)
        sides = (inputs, cut.outputs) if product.is_transposed else (cut.outputs, inputs)
        matrix = self._read(name, (cut.items, *sides)[-len(product.shape) :])
        matrix = (matrix.mT if product.is_transposed else matrix).contiguous()
        weight = made(matrix, recipe) if inputs is None else made(matrix, recipe, of_whole=self._largest)
        return weight.of_inputs(begin - first, end - first)

    def _largest(self, of_part: Tensor) -> Tensor:
        found = self._ranks.all_gather(of_part.to(self._device))
        return found.amax(dim=-1, keepdim=True).to(of_part.device)
