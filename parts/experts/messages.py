"""What a worker tells its scheduler of the tokens that experts have computed."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.ipc.messages import Message


class LayerTokens(Struct, frozen=True, array_like=True, gc=False):
    """What some experts of a layer have computed."""

    layer: Annotated[int, Meta(ge=0, le=2**16)]  # its number in the checkpoint
    num_experts: Annotated[int, Meta(ge=1, le=2**16)]  # of the layer, on all ranks
    tokens: dict[int, Annotated[int, Meta(ge=0)]]  # by the expert's number


class ExpertTokens(Message, frozen=True):
    """How many tokens a rank's experts have computed since its last report. Sent every few seconds."""

    layers: tuple[LayerTokens, ...]  # layers with tokens


FROM_WORKER = (ExpertTokens,)
