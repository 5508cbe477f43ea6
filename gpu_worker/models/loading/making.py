"""Quantized weights that are made of float ones as these are read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.checkpoint.quantization import products_of, recipes_of
from penstock.core.checkpoint.weight_sources import Cut, Ranges
from penstock.gpu_worker.formats.made import made
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.quantized.weight import QuantizedWeight


class Maker:
    """Makes each matrix, or a rank's part of it, which is the same as that part of the whole.

    Where an output has one scale and ranks have parts of its inputs, the ranks tell each other the largest of theirs.
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
            read: reads some ranges of each axis of a tensor; none: all of it.
            ranks: those that make parts of the same matrices at the same time.
            device: where they exchange tensors.
        """
        self._recipes, self._products = recipes_of(config), products_of(config)
        self._read, self._ranks, self._device = read, ranks, device

    def __call__(self, name: str, cut: Cut) -> QuantizedWeight | None:
        """The matrix [N, K], for experts in one tensor [E, N, K]; None if it stays as it is."""
        if name not in self._recipes:
            return None
        recipe, product = self._recipes[name], self._products[name]
        num_inputs, inputs = product.shape[-1], cut.inputs
        begin, end = (0, num_inputs) if inputs is None else inputs[0]
        first = begin
        if inputs is not None and recipe.format == "int4":  # whole groups
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
