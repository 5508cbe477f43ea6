"""Heads with their own layers, which guess token by token: their description, and where their weights are."""

from typing import NamedTuple

import msgspec

from penstock.models.description.decoder import Decoder, Norm
from penstock.models.parsing.family import Shape
from penstock.models.weights.decoder import DecoderSources, decoder_sources, stored_tensors
from penstock.models.weights.sources import LinearSource, NormSource, Source

TOKEN_OFFSETS = "d2t"


class DraftHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head that gets the model's hidden state at each position, and the next token."""

    decoder: Decoder
    """The head's layers, from an `Entry` on, without final norm and output matrix. `has_embedding`: it has its own."""
    norm: Norm | None = None  # before the output matrix
    norm_name: str = "norm"
    num_outputs: int | None = None  # of its own output matrix; None: it uses the model's
    output_name: str = "lm_head"
    has_token_map: bool = False  # output i means token i + d2t[i]
    num_picked: int | None = None  # outputs of the model's matrix that it computes, by a token map; None: all
    taps: tuple[int, ...] = ()
    """Layers of the model whose inputs, concatenated and projected, are the hidden state that it gets. Empty: it gets
    the final hidden state, normed."""
    given_size: int = 0  # size of each tapped input


class HeadSources(NamedTuple):
    """Where a head's weights are."""

    decoder: DecoderSources
    norm: NormSource | None
    output: LinearSource | None
    taps: LinearSource | None


def head_sources(head: DraftHead) -> HeadSources:
    """Return where each weight is."""
    hidden = head.decoder.hidden_size

    def matrix(name: str, *shape: int) -> LinearSource:
        return LinearSource(Source((f"{name}.weight",), (shape,)))

    return HeadSources(
        decoder_sources(head.decoder),
        None if head.norm is None else NormSource(head.norm, Source((f"{head.norm_name}.weight",), ((hidden,),)), None),
        None if head.num_outputs is None else matrix(head.output_name, head.num_outputs, hidden),
        matrix("fc", hidden, len(head.taps) * head.given_size) if head.taps else None,
    )


def head_shapes(head: DraftHead) -> dict[str, Shape]:
    """Return every tensor of floats that the checkpoint must have."""
    return stored_tensors(head_sources(head))
