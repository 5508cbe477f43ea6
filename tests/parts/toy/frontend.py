"""In a frontend: a route, a dialect of another one, what it counts, and what engines tell it."""

from typing import Self

import msgspec
from prometheus_client import Counter

from penstock.frontend.api.service import Service
from penstock.frontend.errors import ErrorShape
from penstock.frontend.exchange.exchange import Dialect, Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.part import FrontendPart
from penstock.ipc.messages import EngineReady
from tests.parts.toy.messages import ToyTold
from tests.parts.toy.options import ToyOptions


class Said(msgspec.Struct):
    """The answer."""

    words: list[str]
    is_started: bool
    max_model_len: int  # of the first engine that was ready
    num_left: int  # requests that have left, as workers count them


async def say(service: Service, record: RequestRecord, body: bytes) -> Reply:
    toy = service.parts.get(Toy)
    assert toy is not None, "no option switches it off"
    return Reply(msgspec.json.encode(toy.say()))


class Oops(msgspec.Struct):
    """How the toy's clients read errors."""

    oops: str


_SHAPE = ErrorShape(Oops, lambda error: msgspec.json.encode(Oops(error.message)))


class Toy(FrontendPart):
    """Says a word; clients with the header `x-toy` get it in place of the models."""

    routes = (Route("GET", "/toy", say, "A word", Said, errors=(500,)),)
    dialect = Dialect("x-toy", _SHAPE, ("x-toy-id",), (Route("GET", "/v1/models", say),))

    def __init__(self, service: Service) -> None:
        self._service = service
        self._options = service.config.of(ToyOptions)
        self._is_started = False
        self._max_model_len = 0
        self._num_left = 0
        self._num_said = Counter("toy_words", "Words that were said.", registry=service.metrics.registry)

    @classmethod
    def of(cls, service: Service) -> Self:
        return cls(service)

    async def start(self) -> None:
        self._is_started = True
        for link in self._service.engine.links:
            link.listeners[ToyTold] = self._on_told

    async def engine_ready(self, facts: EngineReady) -> None:
        self._max_model_len = facts.max_model_len

    def _on_told(self, message: ToyTold) -> None:
        self._num_left = message.num_requests

    def say(self) -> Said:
        words = [self._options.toy_word] * self._options.toy_times
        self._num_said.inc(len(words))
        return Said(words, self._is_started, self._max_model_len, self._num_left)


PARTS = (Toy,)
