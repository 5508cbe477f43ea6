"""Separates what a model thinks before its answer from the answer: `<think>` ... `</think>`.

    BEFORE --start mark--> INSIDE --end mark--> AFTER (white space) --> CONTENT
       `------------- anything else ------------------------------------^

Only the beginning of the output can be reasoning. A template may open it itself, at the end of the prompt:
then the machine begins inside. Its result does not depend on how the text is cut.
"""

from dataclasses import dataclass

from penstock.frontend.parsing.parts import Content, Part, Reasoning, held_suffix

CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    name: str
    start: str
    end: str
    label: str = ""
    """Stands behind the start mark, and is no part of the reasoning."""
    has_channels: bool = False
    """All of the output is made of channels (`channels.py`), one of which is reasoning."""

    @property
    def opening(self) -> str:
        """What begins reasoning."""
        return self.start + self.label

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; a tokenizer may spell them as special tokens, which must then stay visible."""
        return CHANNEL_MARKS if self.has_channels else (self.start, self.end)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template shows these marks."""
        return self.start in template or (not self.label and self.end in template)

    def is_opened_by(self, prompt_end: str, final_message: str = "") -> bool:
        """The output goes on inside reasoning, since the prompt (or the message to continue) opens it."""
        if final_message:
            return final_message.rfind(self.start) > final_message.rfind(self.end)
        return not self.has_channels and prompt_end.rstrip().endswith(self.opening)

    def is_closed_by(self, prompt_end: str, final_message: str = "") -> bool:
        """The output has no reasoning, since the prompt (or the message to continue) has closed it."""
        return bool(final_message) or prompt_end.rstrip().endswith(self.end)


REASONING_FORMATS = {
    reasoning_format.name: reasoning_format
    for reasoning_format in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ReasoningFormat("command_r", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("gemma4", "<|channel>", "<channel|>", label="thought"),
        ReasoningFormat("harmony", "<|channel|>", "<|end|>", label="analysis<|message|>", has_channels=True),
    )
}


def reasoning_format_of(template_source: str) -> ReasoningFormat | None:
    """The format whose marks a chat template shows, if any."""
    for reasoning_format in REASONING_FORMATS.values():
        if reasoning_format.is_taught_by(template_source):
            return reasoning_format
    return None


class ReasoningSplitter:
    """One sequence's text to reasoning and content. White space around the reasoning belongs to neither."""

    def __init__(self, reasoning_format: ReasoningFormat, *, is_open: bool) -> None:
        self._format = reasoning_format
        self._is_open = is_open
        self._state = "before"
        self._buffer = ""
        self._has_text = False  # of reasoning
        self.has_begun = False
        """There is reasoning, though its text may be empty."""

    @property
    def is_over(self) -> bool:
        """The output has got beyond reasoning."""
        return self._state in ("after", "content")

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        if self._state == "content":
            return [Content(text)] if text else []
        self._buffer += text
        return self._advance(is_final=False)

    def finish(self) -> list[Part]:
        """No more text comes; return what was held back."""
        return self._advance(is_final=True)

    def _advance(self, *, is_final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "before":
            self._look_for_start(is_final=is_final)
        if self._state == "inside":
            self.has_begun = True
            self._look_for_end(parts, is_final=is_final)
        if self._state == "after":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
        if self._state == "content" and self._buffer:
            parts.append(Content(self._buffer))
            self._buffer = ""
        return parts

    def _look_for_start(self, *, is_final: bool) -> None:
        start = self._format.opening
        known = self._buffer.lstrip()
        if known.startswith(start):
            self._buffer = known[len(start) :]
            self._state = "inside"
        elif is_final or not start.startswith(known):
            self._state = "inside" if self._is_open else "content"

    def _look_for_end(self, parts: list[Part], *, is_final: bool) -> None:
        end = self._format.end
        text, found, rest = self._buffer.partition(end)
        held = ""
        if not found and not is_final:
            known = text[: len(text) - held_suffix(text, (end,))]
            known = known.rstrip()
            text, held = known, text[len(known) :]
        text = text.rstrip()
        if not self._has_text:
            text = text.lstrip()
        if text:
            self._has_text = True
            parts.append(Reasoning(text))
        self._buffer = rest if found else held
        if found:
            self._state = "after"
