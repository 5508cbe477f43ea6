"""Builds a response's output items from the parts of its message, and the events that report them.

    output_item.added, content_part.added, *.delta ..., *.done, content_part.done, output_item.done

Reasoning of which a summary is wanted is told twice, piece by piece: in `content`, as from other open models, and in
`summary`, which OpenAI's clients show. Streams send the events; complete answers use only the items.
"""

from collections.abc import Sequence
from typing import Any

from penstock.frontend.draws_and_clock import DRAWS
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part, Reasoning
from penstock.frontend.schema import ContentLogprob
from penstock.parts.responses.frontend.schema import (
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    SummaryText,
)

Event = tuple[str, dict[str, Any]]
"""An event's type and its fields, besides its number."""

_SUMMARY = "response.reasoning_summary_"
_PREFIXES = {ReasoningItem: "rs", MessageItem: "msg", FunctionCallItem: "fc", CustomToolCallItem: "ctc"}
_CALLS = (FunctionCallItem, CustomToolCallItem)


class ResponseBuilder:
    """The items of one response. At most one item is open at any time."""

    def __init__(self, *, summarizes: bool = False) -> None:
        """`summarizes`: whether reasoning is told as a summary, too."""
        self._summarizes = summarizes
        self.items: list[OutputItem] = []  # closed ones
        self._open: type[OutputItem] | None = None
        self._item_id = ""
        self._call = ("", "")  # id and name of an open call
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []  # of an open message

    def add(self, part: Part, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """Take a part, with its tokens' log-probabilities if it is content; return the events that report it."""
        match part:
            case CallArguments(_, text):
                self._texts.append(text)
                return [self._event("response.function_call_arguments.delta", delta=text)]
            case CallInput(_, text):
                self._texts.append(text)
                return [self._event("response.custom_tool_call_input.delta", delta=text)]
            case CallStart(_, call_id, name, is_custom):
                kind = CustomToolCallItem if is_custom else FunctionCallItem
                return [*self._close("completed"), *self._begin(kind, (call_id, name))]
            case Reasoning(text):
                events = self._switch(ReasoningItem)
                if self._summarizes:
                    events.append(self._summary_event("text.delta", delta=text))
                name = "response.reasoning_text.delta"
                delta = self._event(name, content_index=0, delta=text)
            case Content(text):
                events = self._switch(MessageItem)
                name = "response.output_text.delta"
                delta = self._event(name, content_index=0, delta=text, logprobs=logprobs)
                self._logprobs += logprobs
        self._texts.append(text)
        return [*events, delta]

    def finish(self, status: Status, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """End the output: an open item gets this status, and a response without items gets an empty text.

        `logprobs` are those of tokens after the last character; they are a message's if the output ends with one.
        """
        events = [] if self.items or self._open is not None else self._begin(MessageItem)
        if logprobs and self._open is MessageItem:
            events += self.add(Content(""), logprobs)
        return [*events, *self._close(status)]

    def _switch(self, kind: type[OutputItem]) -> list[Event]:
        if self._open is kind:
            return []
        return [*self._close("completed"), *self._begin(kind)]

    def _begin(self, kind: type[OutputItem], call: tuple[str, str] = ("", "")) -> list[Event]:
        self._open, self._call, self._texts, self._logprobs = kind, call, [], []
        self._item_id = f"{_PREFIXES[kind]}_{DRAWS.get().randbytes(16).hex()}"
        events: list[Event] = [("response.output_item.added", self._place(item=self._item("in_progress", is_new=True)))]
        if kind is ReasoningItem and self._summarizes:
            events.append(self._summary_event("part.added", part=SummaryText("")))
        if kind not in _CALLS:
            events.append(self._event("response.content_part.added", content_index=0, part=self._part("")))
        return events

    def _close(self, status: Status) -> list[Event]:
        kind, text = self._open, "".join(self._texts)
        if kind is None:
            return []
        item = self._item(status)
        if kind is FunctionCallItem:
            name = self._call[1]
            events = [self._event("response.function_call_arguments.done", name=name, arguments=text)]
        elif kind is CustomToolCallItem:
            events = [self._event("response.custom_tool_call_input.done", input=text)]
        else:
            is_reasoning = kind is ReasoningItem
            done = "response.reasoning_text.done" if is_reasoning else "response.output_text.done"
            more: dict[str, Any] = {} if is_reasoning else {"logprobs": self._logprobs}
            events = []
            if is_reasoning and self._summarizes:
                events += [
                    self._summary_event("text.done", text=text),
                    self._summary_event("part.done", part=SummaryText(text)),
                ]
            events += [
                self._event(done, content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=self._part(text)),
            ]
        events.append(("response.output_item.done", self._place(item=item)))
        self.items.append(item)
        self._open = None
        return events

    def _part(self, text: str) -> ReasoningText | OutputText:
        if self._open is ReasoningItem:
            return ReasoningText(text)
        return OutputText(text, logprobs=tuple(self._logprobs))

    def _item(self, status: Status, *, is_new: bool = False) -> OutputItem:
        text = "".join(self._texts)
        if self._open is ReasoningItem:
            summary = (SummaryText(text),) if self._summarizes and not is_new else ()
            return ReasoningItem(self._item_id, [] if is_new else [ReasoningText(text)], status, summary=summary)
        if self._open is MessageItem:
            message = OutputText(text, logprobs=tuple(self._logprobs))
            return MessageItem(self._item_id, [] if is_new else [message], status)
        if self._open is CustomToolCallItem:
            return CustomToolCallItem(self._item_id, *self._call, text, status)
        return FunctionCallItem(self._item_id, *self._call, text, status)

    def _summary_event(self, kind: str, **fields: Any) -> Event:
        return self._event(f"{_SUMMARY}{kind}", summary_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, self._place(item_id=self._item_id, **fields)

    def _place(self, **fields: Any) -> dict[str, Any]:
        return {"output_index": len(self.items), **fields}
