"""A drafter's own matrices, which are not among the operations of a model."""

from torch import Tensor

from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.native.library import Library
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.native.program.program import Program


class Matrix:
    """A product with a weight, and its bias, by the kernels that compute the model."""

    def __init__(self, linear: Linear, library: Library | None, *, rounds_inputs: bool) -> None:
        self._linear = linear
        self.program: Program | None = None  # has this matrix as its output matrix
        if library is not None:
            packed = linear.pack(library, rounds_inputs=rounds_inputs)
            self.program = ProgramBuilder(packed.num_inputs).build(library, packed)

    def __call__(self, x: Tensor) -> Tensor:
        """[S, in] -> [S, out]"""
        return self._linear(x, None) if self.program is None else self.program.logits(x)


class TokenMap:
    """The tokens to which outputs belong, if outputs are the logits of some tokens only."""

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        """`token_ids`: int64, the token of each output."""
        self.token_ids = token_ids
        self._vocab_size = vocab_size

    def __call__(self, logits: Tensor) -> Tensor:
        """[S, outputs] -> [S, V]; other tokens are never guessed."""
        of_all = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        return of_all.index_copy_(1, self.token_ids, logits)
