"""The checkpoint's chat template, rendered as transformers renders it, in Jinja's sandbox (`sandbox.py`).

It has the same settings (trim_blocks, lstrip_blocks, loop controls), filters (`tojson` without HTML or ASCII escapes),
globals (`raise_exception`, `strftime_now`, `dict`, `namespace`) and `{% generation %}` tag, so that the text equals
`tokenizer.apply_chat_template(..., tokenize=False)` for all conversations that the template shows whole. Others are
brought into a shape that it does show (`shaping.py`), which is found by rendering small ones (`probing.py`).
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from penstock.config import ConfigError
from penstock.frontend.errors import ApiError, ContextLengthExceeded, TemplateFailed
from penstock.frontend.image_source import ImageSource
from penstock.frontend.text.call_style import NAME, TOOL, VALUE, Chat, Tools
from penstock.frontend.text.probing import find_shape
from penstock.frontend.text.sandbox import VariableFinder, changes_values, environment, tojson
from penstock.frontend.text.shaping import Shape
from penstock.frontend.text.tool_prompt import ToolFields
from penstock.models.files.folder import read_text
from penstock.models.files.source import Checkpoint

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED = frozenset(
    {"messages", "tools", "xml_tools", "functions", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)
"""Names that a request may not set as template variables: they have fields of their own, or none."""

_TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables in which templates look for tools; the second one is SmolLM3's."""
_TEXT_VARIABLE = "functions"
"""A variable in which FireFunction's template looks for them, as JSON text; it has one for the date, too."""
_PROBE_CHARS = 1 << 20
_KNOWN_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_MAX_ROLES = 64
_MAX_TOLD = 8
_EFFORT = "reasoning_effort"
_MAX_WARNING = 200


@dataclass(frozen=True, slots=True)
class ValidConversation:
    """Messages that a chat template can be given, and how to render them."""

    messages: Chat
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    warnings: tuple[str, ...] = ()  # for the client; see `exchange.py`
    images: tuple[ImageSource, ...] = ()  # of the parts of type `image`, in order
    example: str = ""  # a call in the model's own format


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's prompt, and what the client should know about it."""

    text: str
    warnings: tuple[str, ...] = ()


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        sandbox = environment()
        try:
            finder = VariableFinder(sandbox)
            parsed = sandbox.parse(source)
            finder.visit(parsed)
            self._changes_values = changes_values(parsed)
            if self._changes_values:
                sandbox = environment(SandboxedEnvironment)
            self._template = sandbox.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self.source = source
        self.words = frozenset(re.findall(r"\w+", source))
        """All words of the template; they include every name that it may read."""
        self._special_tokens = special_tokens
        variables = finder.undeclared_identifiers
        self._tool_variables = [name for name in _TOOL_VARIABLES if name in variables]
        self.has_tool_variable = bool(self._tool_variables) or _TEXT_VARIABLE in variables
        """Whether it reads a variable with tools; what it does with them, only rendering shows."""
        self._has_text_variable = _TEXT_VARIABLE in variables
        self._has_date = self._has_text_variable and "datetime" in variables
        self.extra_variables = frozenset(variables) - RESERVED - set(special_tokens) - set(sandbox.globals)
        """The variables that a request may set through `chat_template_kwargs`: only those that the template reads."""
        self._dropped_roles: dict[str, bool] = {}  # whether messages of an unusual role are left out without a word

    def render(
        self,
        messages: Chat,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        tools: Tools = None,
    ) -> str:
        """The text of a conversation's prompt. Raises the same errors as `render_conversation`."""
        given = ValidConversation(messages, add_generation_prompt, continue_final_message, variables or {}, tools)
        return self.render_conversation(given).text

    def render_conversation(self, given: ValidConversation, *, max_chars: int = 1 << 30) -> Rendered:
        """The prompt of a conversation. Rendering may take for ever, so it is done in the process of `child.py`.

        Raises:
            TemplateFailed: if the template refuses the conversation, fails on it, or cannot show one of its roles.
            ContextLengthExceeded: if it writes more than `max_chars`.
        """
        self._check_roles(given.messages)
        failed = None
        for shape, variables, told in self._attempts(given):
            try:
                chat, tools = shape.apply(given.messages, given.tools, given.example)
                final = _mark_final_message(chat) if given.continue_final_message else ""
                text = self._write(chat, tools, given.add_generation_prompt, variables, max_chars)
                if given.continue_final_message:
                    text = _cut_at_mark(text, final)
            except TemplateFailed as error:
                failed = failed or error
            else:
                return Rendered(text, (*told, *_lost(given.messages, text)))
        assert failed is not None
        raise failed

    def _attempts(self, given: ValidConversation) -> Iterator[tuple[Shape, dict[str, Any], tuple[str, ...]]]:
        """Shapes and variables to try one after the other, and what the client should know about each."""
        shapes, variables = [self.shape], given.variables
        if given.continue_final_message:  # the mark makes a text of an empty one
            shapes = [replace(self.shape, ending=None, empty_answer="kept")]
        if given.tools and self.shape.tool_fields != _ALL_FIELDS:  # a schema may be of a kind that no probe had
            shapes.append(replace(shapes[0], tool_fields=_ALL_FIELDS))
        for shape in shapes:
            yield shape, variables, ()
        if _EFFORT in variables:  # agents send efforts that not every template knows
            told = f"{_EFFORT}: {variables[_EFFORT]!r} has no effect, this model's chat template refuses it"
            variables = {name: value for name, value in variables.items() if name != _EFFORT}
            for shape in shapes:
                yield shape, variables, (told[:_MAX_WARNING],)

    @cached_property
    def shape(self) -> Shape:
        """What the template needs changed; found by rendering, so only in the process of `child.py`."""
        return find_shape(lambda chat, tools: self._write(chat, tools, True, {}, _PROBE_CHARS))

    def _check_roles(self, messages: Chat) -> None:
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in _KNOWN_ROLES and self._drops_role(role):
                raise TemplateFailed(
                    f"messages[{index}]: the chat template does not show messages of role {role!r}", param="messages"
                )

    def _drops_role(self, role: str) -> bool:
        if role not in self._dropped_roles:
            if len(self._dropped_roles) == _MAX_ROLES:
                self._dropped_roles.clear()
            said = [{"role": "user", "content": NAME}, {"role": role, "content": VALUE}]
            try:
                self._dropped_roles[role] = VALUE not in self._write(said, None, True, {}, _PROBE_CHARS)
            except ApiError:
                self._dropped_roles[role] = False  # the template says itself that it refuses the role
        return self._dropped_roles[role]

    def _write(
        self, chat: Chat, tools: Tools, add_generation_prompt: bool, variables: dict[str, Any], max_chars: int
    ) -> str:
        if tools and self._has_tools_in_message:
            chat = _with_tools(chat, tools)
        if self._wants_parts:
            chat = [_in_parts(message) for message in chat]
        return self._generated(chat, tools, add_generation_prompt, variables, max_chars)

    @cached_property
    def _has_tools_in_message(self) -> bool:
        """Whether tools are a field of the system message, as text: so it is with Phi-4-mini."""
        said, tools = [{"role": "user", "content": VALUE}], [TOOL]
        return not self._generates(NAME, said, tools) and self._generates(NAME, _with_tools(said, tools), tools)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts: some templates for models with images ignore plain texts."""
        said = {"role": "user", "content": VALUE}
        return not self._generates(VALUE, [said]) and self._generates(VALUE, [_in_parts(said)])

    @cached_property
    def _absent(self) -> dict[str, None]:
        """The variables that are none where there are no tools. Some templates only look whether they are defined."""
        with_none = dict.fromkeys(("tools", "documents", *self._tool_variables))
        said = [{"role": "user", "content": VALUE}]
        texts = []
        for absent in (with_none, {}):
            try:
                texts.append(self._rendered(said, absent, True, {}, _PROBE_CHARS))
            except ApiError:
                texts.append("")
        as_none, undefined = texts
        is_none_right = bool(as_none) and (not undefined or len(as_none) <= len(undefined))
        return with_none if is_none_right else {}

    def _generates(self, word: str, chat: Chat, tools: Tools = None) -> bool:
        try:
            return word in self._generated(chat, tools, True, {}, _PROBE_CHARS)
        except ApiError:
            return False

    def _generated(
        self, chat: Chat, tools: Tools, add_generation_prompt: bool, variables: dict[str, Any], max_chars: int
    ) -> str:
        given: dict[str, Any] = {**self._absent}
        if tools:
            given |= dict.fromkeys(["tools", *self._tool_variables], tools)
        return self._rendered(chat, given, add_generation_prompt, variables, max_chars)

    def _rendered(
        self,
        chat: Chat,
        given: dict[str, Any],
        add_generation_prompt: bool,
        variables: dict[str, Any],
        max_chars: int,
    ) -> str:
        try:
            if self._has_text_variable:
                functions = [tool["function"] for tool in given.get("tools") or ()]
                given = {_TEXT_VARIABLE: tojson(functions, indent=4), **given}
            if self._has_date:
                given = {"datetime": datetime.now().strftime("%Y-%m-%d"), **given}
            special = self._special_tokens
            if self._changes_values:  # nothing may stay behind for the next conversation
                chat, given, variables, special = copy.deepcopy((chat, given, variables, special))
            return _joined(
                self._template.generate(
                    messages=chat,
                    add_generation_prompt=add_generation_prompt,
                    **given,
                    **{**special, **variables},
                ),
                max_chars,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the chat template refuses these messages: {error}", param="messages") from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise TemplateFailed(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from None


_ALL_FIELDS = ToolFields(descriptions=True, parameters=True, types=True)


def _lost(messages: Chat, text: str) -> Iterator[str]:
    """Warnings about instructions and questions whose text the prompt does not have."""
    at = num_told = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if message["role"] not in ("system", "developer", "user") or not isinstance(content, str):
            continue
        said = content.strip()
        place = text.find(said, at)  # texts come in the order of the messages: each is found soon
        place = place if place >= 0 else text.find(said)
        at = max(place, 0)
        if place < 0:
            yield f"messages[{index}]: the chat template does not show this text as it was sent"
            num_told += 1
            if num_told == _MAX_TOLD:
                return


def _joined(pieces: Iterator[str], max_chars: int) -> str:
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > max_chars:
            raise ContextLengthExceeded(f"the chat template writes more than {max_chars} characters", param="messages")
    return "".join(kept)


def num_images(message: dict[str, Any]) -> int:
    """How many images a message has."""
    content = message.get("content")
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_tools(chat: Chat, tools: list[dict[str, Any]]) -> Chat:
    """The chat with the tools in its system message, as JSON text; the message is added if there is none."""
    first, rest = (
        ({"role": "system", "content": ""}, chat)
        if not chat or chat[0].get("role") != "system"
        else (chat[0], chat[1:])
    )
    return [{**first, "tools": tojson([tool["function"] for tool in tools])}, *rest]


def _mark_final_message(chat: Chat) -> str:
    """Append the mark to the last message's text, in place; return that text."""
    final = chat[-1].get("content") if chat else None
    if not isinstance(final, str):
        raise TemplateFailed("continue_final_message needs a last message with text content", param="messages")
    chat[-1] = {**chat[-1], "content": final + _CONTINUE_MARK}
    return final


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.strip()
    if mark not in text or final.strip() not in text:
        raise TemplateFailed("the chat template does not show the last message, so it cannot be continued")
    position = text.rindex(mark)
    if text[position : position + len(_CONTINUE_MARK)] == _CONTINUE_MARK:
        return text[:position]
    return text[:position].rstrip()  # the template trims messages


def load_chat_template(checkpoint: Checkpoint, override: str, special_tokens: dict[str, Any]) -> ChatTemplate | None:
    """The template of --chat-template, else the checkpoint's, if any.

    Raises:
        ConfigError: if it cannot be read, or does not compile.
    """
    source = read_text(Path(override), "the chat template") if override else checkpoint.chat_template()
    return None if source is None else ChatTemplate(source, special_tokens)
