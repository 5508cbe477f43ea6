"""Separates a model's reasoning from the answer that follows: `<think>` ... `</think>`.

    BEFORE --start mark--> INSIDE --end mark--> AFTER (white space) --> CONTENT
       |------------- anything else -----------------|------------------^
       `------------- mark of the answer ------------`--> ANSWER --its end mark--> BEHIND (white space) --^

Only the beginning of the output can be reasoning. A template may open it at the end of the prompt; the state machine
then begins inside. Some models also put marks around the answer, which are not part of it. The result does not depend
on how the text is cut.
"""

from dataclasses import dataclass

from penstock.frontend.parsing.parts import Content, Part, Reasoning, held_suffix

CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    name: str
    models: tuple[str, ...]
    """Families that use this format; for the documentation."""
    start: str
    end: str
    label: str = ""
    """Text after the start mark that is not part of the reasoning."""
    answer: tuple[str, str] | None = None
    """The marks around the answer, which a model may leave out. The first may be empty: the answer begins at once."""
    tail: str = ""
    """Text behind the answer's last mark that is not content."""
    tokens: tuple[str, ...] = ()
    """The special tokens in the marks, if those are more than one token each."""
    hints: tuple[str, ...] = ("",)
    """A template must also contain one of these texts, because other formats have the same marks."""
    has_channels: bool = False
    """Whether the whole output is made of channels (`channels.py`), one of which is reasoning."""

    @property
    def opening(self) -> str:
        """The text that begins reasoning."""
        return self.start + self.label

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; a tokenizer may spell them as special tokens, which must then stay visible."""
        if self.has_channels:
            return CHANNEL_MARKS
        return self.tokens or (self.start, self.end, *filter(None, self.answer or ()))

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template contains these marks."""
        template = template.replace("\\n", "\n")
        marks = (self.start, self.end) if not self.tokens else self.tokens[:1]
        shows = self.start in template or (not self.label and any(mark in template for mark in marks))
        return shows and any(hint in template for hint in self.hints)

    def is_opened_by(self, prompt_end: str, final_message: str = "") -> bool:
        """Whether the output begins inside reasoning, because the prompt (or the message to continue) opens it."""
        if final_message:
            return final_message.rfind(self.start) > final_message.rfind(self.end)
        return not self.has_channels and prompt_end.rstrip().endswith(self.opening)

    def is_closed_by(self, prompt_end: str, final_message: str = "") -> bool:
        """Whether the output has no reasoning, because the prompt (or the message to continue) has closed it."""
        if final_message:
            return self.has_channels or not self.is_opened_by(prompt_end, final_message)
        return prompt_end.rstrip().endswith(self.end) or self.is_answered_by(prompt_end)

    def is_answered_by(self, prompt_end: str) -> bool:
        """Whether the output begins inside the answer, because the prompt opens it."""
        opening = self.answer[0] if self.answer is not None else ""
        return bool(opening) and prompt_end.rstrip().endswith(opening)


_THINK = ("<think>", "</think>")

REASONING_FORMATS = {
    reasoning_format.name: reasoning_format
    for reasoning_format in (
        # A template is compared with them in this order.
        ReasoningFormat(
            "think_answer", ("Hunyuan",), *_THINK, answer=("<answer>", "</answer>"), hints=("<answer>",)
        ),
        ReasoningFormat(
            "think_response", ("Granite 3.3", "ERNIE 4.5 Thinking"), *_THINK, answer=("<response>", "</response>"),
            hints=("<response>\n", "<response></response>"),
        ),
        ReasoningFormat(
            "think",
            (
                *("DeepSeek R1, V3.1 and V3.2", "Qwen3", "QwQ", "GLM-4.5 and later", "Phi-4-reasoning", "SmolLM3"),
                *("EXAONE 4", "OLMo 3 Think", "Kimi K2 Thinking", "MiniMax M2", "Nemotron Nano 2 and 3"),
            ),
            *_THINK,
        ),
        ReasoningFormat("minimax_m3", ("MiniMax M3",), "<mm:think>", "</mm:think>"),
        ReasoningFormat("hy3", ("Hunyuan 3",), "<think:opensource>", "</think:opensource>"),
        ReasoningFormat(
            "kimi_k3", ("Kimi K3",), "<|open|>think<|sep|>", "<|close|>think<|sep|>",
            answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"), tail="<|close|>message<|sep|>",
            hints=("<|open|>",), tokens=("<|open|>", "<|close|>", "<|sep|>"),
        ),
        ReasoningFormat(
            "solar_open", ("Solar Open",), "<|think|>", "<|end|><|begin|>assistant",
            answer=("<|content|>", "<|end|>"), hints=("<|begin|>assistant",),
            tokens=("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        ),
        ReasoningFormat(
            "glimmer", ("Muse Glimmer",), "to=self<|message|>", "<|eom|><|start|>assistant",
            answer=("to=user<|message|>", "<|eot|>"), hints=("to=self", "<atem:"),
            tokens=("<|message|>", "<|eom|>", "<|start|>", "<|eot|>"),
        ),
        ReasoningFormat(
            "apriel", ("Apriel 1.5 and 1.6 Thinker",), "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]",
            answer=("", "[END FINAL RESPONSE]"), hints=("[BEGIN FINAL RESPONSE]",),
        ),
        ReasoningFormat("mistral", ("Magistral", "Ministral 3 Reasoning"), "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", ("Seed-OSS",), "<seed:think>", "</seed:think>"),
        ReasoningFormat("apertus", ("Apertus",), "<|inner_prefix|>", "<|inner_suffix|>"),
        ReasoningFormat(
            "cohere_text", ("Command A 2 (mixture of experts)",), "<|START_THINKING|>", "<|END_THINKING|>",
            answer=("<|START_TEXT|>", "<|END_TEXT|>"), hints=("<|START_TEXT|>",),
        ),
        ReasoningFormat(
            "command_r", ("Command R7B", "Command A"), "<|START_THINKING|>", "<|END_THINKING|>",
            answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ReasoningFormat("granite", ("Granite 3.2",), "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("gemma4", ("Gemma 4",), "<|channel>", "<channel|>", label="thought"),
        ReasoningFormat(
            "harmony", ("gpt-oss",), "<|channel|>", "<|end|>", label="analysis<|message|>", has_channels=True
        ),
    )
}  # fmt: skip


def reasoning_format_of(template_source: str) -> ReasoningFormat | None:
    """The format whose marks a chat template contains, if any."""
    for reasoning_format in REASONING_FORMATS.values():
        if reasoning_format.is_taught_by(template_source):
            return reasoning_format
    return None


class ReasoningSplitter:
    """Splits one sequence's text into reasoning and content. White space around the reasoning belongs to neither."""

    def __init__(self, reasoning_format: ReasoningFormat, *, is_open: bool, is_answer: bool = False) -> None:
        """`is_open`: the prompt has opened reasoning; `is_answer`: it has opened the answer."""
        self._format = reasoning_format
        self._is_open = is_open
        self._state = "answer" if is_answer else "before"
        self._buffer = ""
        self._has_text = False  # there was text between the marks
        self.has_begun = False
        """Whether there is reasoning, though its text may be empty."""

    @property
    def is_over(self) -> bool:
        """Whether reasoning has ended."""
        return self._state not in ("before", "inside")

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        if self._state == "content":
            return [Content(text)] if text else []
        self._buffer += text
        return self._advance(is_final=False)

    def finish(self) -> list[Part]:
        """End the text; return what was held back."""
        return self._advance(is_final=True)

    def _advance(self, *, is_final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "before":
            self._look_for_start(is_final=is_final)
        if self._state == "inside":
            self.has_begun = True
            text, is_whole = self._up_to(self._format.end, is_final=is_final)
            parts += [Reasoning(text)] if text else []
            self._state = "after" if is_whole else "inside"
        if self._state == "after":
            self._look_for_answer(is_final=is_final)
        if self._state == "answer" and self._format.answer is not None:
            text, is_whole = self._up_to(self._format.answer[1], is_final=is_final)
            parts += [Content(text)] if text else []
            self._state = "behind" if is_whole else "answer"
        if self._state == "behind":
            self._look_for_tail(is_final=is_final)
        if self._state == "content" and self._buffer:
            parts.append(Content(self._buffer))
            self._buffer = ""
        return parts

    def _look_for_tail(self, *, is_final: bool) -> None:
        rest, tail = self._buffer.lstrip(), self._format.tail
        if tail and rest.startswith(tail):
            self._buffer = rest[len(tail) :]
        elif rest and (is_final or not tail.startswith(rest)):
            self._state = "content"

    def _look_for_start(self, *, is_final: bool) -> None:
        start, answer = self._format.opening, self._format.answer
        known = self._buffer.lstrip()
        if known.startswith(start):
            self._buffer = known[len(start) :]
            self._state = "inside"
        elif answer is not None and answer[0] and not self._is_open and known.startswith(answer[0]):
            self._state = "after"
        elif not self._is_open and known.startswith(self._format.end):  # the model says that it does not reason
            self._buffer = known[len(self._format.end) :]
            self._state = "after"
        elif is_final or not any(mark.startswith(known) for mark in (start, self._format.end, (answer or ("",))[0])):
            self._state = "inside" if self._is_open else "content"

    def _look_for_answer(self, *, is_final: bool) -> None:
        self._buffer = self._buffer.lstrip()
        answer = self._format.answer
        opening = "" if answer is None else answer[0]
        if answer is not None and self._buffer and self._buffer.startswith(opening):
            self._buffer = self._buffer[len(opening) :]
            self._has_text = False
            self._state = "answer"
        elif self._buffer and (is_final or not opening.startswith(self._buffer)):
            self._state = "content"

    def _up_to(self, end: str, *, is_final: bool) -> tuple[str, bool]:
        """Take the text that is certainly before the end mark, without white space around it; whether the mark came."""
        text, found, rest = self._buffer.partition(end)
        if not found and not is_final:
            text = text[: len(text) - held_suffix(text, (end,))]
        text = text.rstrip()
        self._buffer = rest if found else "" if is_final else self._buffer[len(text) :]
        if not self._has_text:
            text = text.lstrip()
        self._has_text |= bool(text)
        return text, bool(found)
