"""An embedding and an output matrix that are split over ranks by tokens."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.activation import Activation
from penstock.kernels.native.library import Library, PackedLinear
from penstock.models.description.decoder import Decoder, Range
from penstock.models.shards.ranges import logit_width


class VocabularyPart(NamedTuple):
    """The tokens of this rank, and the ranks that have the others."""

    tokens: Range
    vocab_size: int
    ranks: Ranks

    def gathered(self, logits: Tensor) -> Tensor:
        """[S, tokens of this rank] -> [S, V]"""
        width = logit_width(self.vocab_size, self.ranks.place.num_tensor)
        padded = functional.pad(logits, (0, width - logits.shape[1])) if logits.shape[1] < width else logits
        found = self.ranks.all_gather(padded)
        return found if found.shape[1] == self.vocab_size else found[:, : self.vocab_size].contiguous()


def vocabulary_part(config: Decoder, ranks: Ranks) -> VocabularyPart | None:
    """The part of a rank; None if the rank has the whole vocabulary."""
    if config.shard is None or config.shard.place.num_tensor == 1:
        return None
    return VocabularyPart(config.shard.vocab, config.vocab_size, ranks)


class SharedEmbedding(NamedTuple):
    """See `Embedding`. Each rank looks up its own tokens, and the results are summed over the ranks."""

    rows: Embedding  # for this rank's tokens
    part: VocabularyPart

    def __call__(self, step: ForwardInputs) -> Tensor:
        first, end = self.part.tokens
        ids = step.input_ids - first
        is_other = (ids < 0) | (ids >= end - first)
        found = self.rows(step._replace(input_ids=ids.masked_fill(is_other, 0)))
        return self.part.ranks.all_reduce(found.masked_fill_(is_other[:, None], 0))

    def head(self) -> Linear:
        return GatheredHead(self.rows.head(), self.part)

    def pack(self, library: Library) -> Tensor | PackedLinear:
        return self.rows.pack(library)


class GatheredHead(NamedTuple):
    """See `Linear`. Each rank computes its own tokens' logits, and gathers the other logits from the other ranks."""

    linear: Linear
    part: VocabularyPart

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return self.part.gathered(self.linear(x, step))

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return self.linear.pack(library, interleaved=interleaved, rounds_inputs=rounds_inputs)
