"""Samplers that parts bring: each is a class with its parameters, and what it does to the logits of one row.

A part lists its samplers as `PARTS` in its `samplers.py`, in the order in which they are applied; those of other
distributions follow. Frontends make fields of requests from their parameters, check them, and send the samplers that a
request uses with their numbers, in the request's order; workers apply them. The four that
every request may use (penalties, temperature, filters, bias) also have a faster form in the kernels, in a fixed order,
which is taken where no other is asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct

from penstock.config.parts import brought


class Parameter(NamedTuple):
    """A field of requests. Its type is that of the default: a number, a whole number, a switch, or texts."""

    name: str
    default: float | bool | tuple[str, ...]
    low: float = 0.0
    high: float = 1.0
    help: str = ""
    synonyms: tuple[str, ...] = ()  # what clients of other engines call it

    @property
    def kind(self) -> Any:
        """The type of the field, with the help as its description."""
        kind: Any = list[str] | str if isinstance(self.default, tuple) else type(self.default)
        described: Any = Annotated  # the type is known when the program runs
        return described[kind | None, Meta(description=self.help)]


class ProcessorUse(Struct):
    """A logits processor that a request asks for, and what it is made with."""

    name: str | None = None
    qualname: str | None = None  # what other engines call the name
    args: dict[str, Any] | list[Any] | None = None
    kwargs: dict[str, Any] | None = None  # what other engines call the arguments


class Draw(NamedTuple):
    """What a sampler may know of the token to be drawn. It must depend on nothing else, or recovery is not exact."""

    token_ids: Any  # torch.Tensor, int32[n]: the prompt and the outputs so far, on the device
    num_prompt_tokens: int
    uniform: Callable[[], float]  # above 0 and below 1; of the row's seed and this position alone
    state: Any = None  # torch.Tensor, fp32[]: what a sampler with `keeps` has kept of the row


class Sampler:
    """What changes one row's logits before its token is drawn from their softmax. Subclasses have no instances."""

    name: ClassVar[str]
    """In lists of an order, and in messages."""

    others: ClassVar[tuple[str, ...]] = ()
    """What it is called in the lists of other engines."""

    parameters: ClassVar[tuple[Parameter, ...]] = ()

    replaces: ClassVar[str] = ""
    """The sampler in whose place it stands if it is used; "" if it has a place of its own."""

    beside: ClassVar[tuple[str, ...] | None] = None
    """If it `keeps` something: the only samplers that are applied before it, unless a request says otherwise with
    `sampler_priority`; None: all."""

    keeps: ClassVar[bool] = False
    """Whether it keeps a number of each row, which changes with each token. It then comes last, as it must know of what
    the token is drawn; there can be one such sampler in a request. The number travels with the tokens (`kept`)."""

    penalizes: ClassVar[bool] = False
    """Whether it makes some tokens less likely by what was there before. Others are only about draws: a search for the
    most likely tokens leaves them out, and is refused beside this one."""

    heats: ClassVar[bool] = False
    """Whether it makes the whole distribution flatter or steeper: `temperature_last` moves it behind all others."""

    neutral: ClassVar[Mapping[str, Any]] = {}
    """For what the kernels can do, too: the fields of `SamplingParams` that switch it off there."""

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        """The numbers to send; None if the sampler is off.

        Args:
            given: its parameters, checked and with defaults, and the fields of `SamplingParams`.
        """
        raise NotImplementedError

    @classmethod
    def texts(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Texts whose last tokens are sent behind the values."""
        return ()

    @classmethod
    def apply(cls, z: Any, values: tuple[float, ...], draw: Draw) -> Any:
        """Return the new logits.

        Args:
            z: torch.Tensor, fp32[V], which may be overwritten; minus infinity for what cannot be drawn.
            values: as `values` has returned them, then token ids of `texts`.
            draw: what is known of the token.
        """
        raise NotImplementedError

    @classmethod
    def first_state(cls, values: tuple[float, ...]) -> float:
        """What it keeps of a row without outputs, if it `keeps` something."""
        raise NotImplementedError

    @classmethod
    def kept(cls, z: Any, values: tuple[float, ...], state: Any, token: Any) -> Any:
        """Return what it keeps from now on, if it `keeps` something.

        Args:
            z: torch.Tensor, fp32[V], what `apply` has returned.
            values: as `apply` gets them.
            state: torch.Tensor, fp32[], what it has kept so far.
            token: torch.Tensor, int64[], the token drawn from the softmax of `z`.
        """
        raise NotImplementedError


@cache
def samplers() -> Mapping[str, type[Sampler]]:
    """All samplers by name, in the order in which they are applied."""
    return {kind.name: kind for kind in brought("samplers", Sampler)}


@cache
def names() -> Mapping[str, str]:
    """What lists of an order may call them -> their names."""
    found: dict[str, str] = {}
    for kind in samplers().values():
        found |= dict.fromkeys((kind.name, *kind.others), kind.name)
    return found


def parameters() -> Iterator[Parameter]:
    """The parameters of all samplers."""
    for kind in samplers().values():
        yield from kind.parameters


def fields() -> list[tuple[str, Any, None]]:
    """The fields of a request for sampling, as `msgspec.defstruct` takes them; none if there are no samplers."""
    if not samplers():
        return []
    texts = list[str] | str | None
    orders: list[tuple[str, Any, None]] = [
        ("samplers", texts, None),
        ("sampler_priority", texts, None),
        ("temperature_last", bool | None, None),
        ("logits_processors", list[str | ProcessorUse] | None, None),
    ]
    return [*orders, *((each.name, each.kind, None) for each in parameters())]
