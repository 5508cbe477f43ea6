"""The check at the end for streams: texts are collected while they go out, and a last chunk says what is wrong.

Only for requests whose schema could not be enforced as a whole (`Grammar.checked_schema`); others pay nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.frontend.api.chunks import ChatChunks, CompletionChunks
from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.grammars.reader import Grammar
from penstock.frontend.schema import Usage


class Collected:
    """The texts that have gone out, and how they ended, by index."""

    def __init__(self) -> None:
        self.texts: dict[int, list[str]] = {}
        self.finish_reasons: dict[int, str] = {}

    def take(self, event: SequenceEvent) -> None:
        """Note an event."""
        if event.text:
            self.texts.setdefault(event.index, []).append(event.text)
        if event.finish_reason is not None:
            self.finish_reasons[event.index] = event.finish_reason


class CheckedChatChunks(ChatChunks):
    """Chat chunks that are collected."""

    collected: Collected

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """The chunk of an event."""
        self.collected.take(event)
        return super().event(event, usage)


class CheckedCompletionChunks(CompletionChunks):
    """Completion chunks that are collected."""

    collected: Collected

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """The chunk of an event."""
        self.collected.take(event)
        return super().event(event, usage)


class _Checked(Protocol):
    collected: Collected

    def mismatch(self, index: int, error: str) -> bytes:
        """A chunk that says why a finished text does not match its schema."""
        ...


def last_words(
    service: Service, record: RequestRecord, grammar: Grammar, chunks: _Checked
) -> Callable[[], Awaitable[bytes]]:
    """What is told before the end of a stream: a chunk for each text that does not match."""

    async def check() -> bytes:
        collected, told = chunks.collected, b""
        for index, reason in sorted(collected.finish_reasons.items()):
            text = "".join(collected.texts.get(index, ()))
            if wrong := await service.schema_error(grammar, record, text, reason):
                told += chunks.mismatch(index, wrong)
        return told

    return check
