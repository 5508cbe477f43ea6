"""The checkpoint's chat template, rendered as transformers renders it, in Jinja's immutable sandbox.

It has the same settings (trim_blocks, lstrip_blocks, loop controls), filters (`tojson` without HTML or ASCII escapes),
globals (`raise_exception`, `strftime_now`, `dict`, `namespace`) and `{% generation %}` tag, so that the text equals
`tokenizer.apply_chat_template(..., tokenize=False)`.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import msgspec
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.core.checkpoint.files.folder import read_text
from penstock.core.checkpoint.files.source import Checkpoint
from penstock.core.config import ConfigError
from penstock.frontend.errors import ApiError, ContextLengthExceeded, TemplateFailed
from penstock.frontend.image_source import ImageSource

Chat = list[dict[str, Any]]
NoContent = Literal["empty", "none", "absent"]
Arguments = Literal["object", "text"]
CallsAs = Literal["calls", "content"]
Beside = Literal["kept", "joined", "dropped"]

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED = frozenset(
    {"messages", "tools", "xml_tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)
"""Names that a request may not set as template variables: they have fields of their own, or none."""

_TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables in which templates look for tools; the second one is SmolLM3's."""
_TOOLS_OF_A_MESSAGE = re.compile(r"message(\.tools\b|\[.tools.\])")
"""Phi-4-mini's template reads tools from the system message, as text."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PROBE_CHARS = 1 << 20


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


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls are passed to a template."""

    no_content: NoContent = "empty"
    arguments: Arguments = "object"
    calls_as: CallsAs = "calls"
    content: Beside = "kept"
    """What becomes of content beside calls: it is kept, appended to the reasoning if there is any, or left out."""

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template wants it; None values are dropped, except for a content that must be none."""
        given = {name: value for name, value in message.items() if value is not None}
        if given.get("role") != "assistant":
            return given
        if not given.get("tool_calls"):
            given.pop("tool_calls", None)  # templates check whether the list exists
        elif self.calls_as == "content":
            given["content"] = "\n".join((*filter(None, [given.get("content")]), _as_text(given.pop("tool_calls"))))
        elif self.content == "dropped":
            given.pop("content", None)
        elif self.content == "joined" and (name := next((n for n in _REASONING_FIELDS if given.get(n)), "")):
            given[name] = "\n\n".join(filter(None, (given[name], given.pop("content", None))))
        if "content" not in given and not (given.get("tool_calls") and self.no_content != "empty"):
            given["content"] = ""
        elif "content" not in given and self.no_content == "none":
            given["content"] = None
        if self.arguments == "text" and given.get("tool_calls"):
            given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
        return given


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            finder = _VariableFinder(environment)
            finder.visit(environment.parse(source))
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self.source = source
        self.words = frozenset(re.findall(r"\w+", source))
        """All words of the template; they include every name that it may read."""
        self._special_tokens = special_tokens
        variables = finder.undeclared_identifiers
        self._tool_variables = [name for name in _TOOL_VARIABLES if name in variables]
        self._has_tools_in_message = not self._tool_variables and bool(_TOOLS_OF_A_MESSAGE.search(source))
        self.reads_tools = bool(self._tool_variables) or self._has_tools_in_message
        self.extra_variables = frozenset(variables) - RESERVED - set(special_tokens) - set(environment.globals)
        """The variables that a request may set through `chat_template_kwargs`: only those that the template reads."""

    def render(
        self,
        messages: Chat,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int = 1 << 30,
    ) -> str:
        """The prompt text of a conversation. Rendering may take for ever, so it is done in the process of `child.py`.

        Raises:
            TemplateFailed: if the template refuses the conversation, or fails on it.
            ContextLengthExceeded: if it writes more than `max_chars`.
        """
        style = self._call_style if any(message.get("tool_calls") for message in messages) else CallStyle()
        chat = [_with_reasoning_names(style.apply(message)) for message in messages]
        if tools and self._has_tools_in_message:
            chat = _with_tools(chat, tools)
        final = ""
        if continue_final_message:
            final = _mark_final_message(chat)
        text = self._write(chat, tools, add_generation_prompt, variables or {}, max_chars)
        return _cut_at_mark(text, final) if continue_final_message else text

    @cached_property
    def _call_style(self) -> CallStyle:
        return find_style(lambda chat, tools: self._write(chat, tools, True, {}, _PROBE_CHARS))

    def _write(
        self,
        chat: Chat,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        max_chars: int,
    ) -> str:
        if self._wants_parts:
            chat = [_in_parts(message) for message in chat]
        return self._generated(chat, tools, add_generation_prompt, variables, max_chars)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts: some templates for models with images ignore plain texts."""

        def shows(message: dict[str, Any]) -> bool:
            try:
                return _VALUE in self._generated([message], None, True, {}, _PROBE_CHARS)
            except ApiError:
                return False

        said = {"role": "user", "content": _VALUE}
        return {"type", "text"} <= self.words and not shows(said) and shows(_in_parts(said))

    def _generated(
        self,
        chat: Chat,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        max_chars: int,
    ) -> str:
        try:
            return _joined(
                self._template.generate(
                    messages=chat,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{"tools": None, **dict.fromkeys(self._tool_variables, tools)},
                    **{**self._special_tokens, **variables},
                ),
                max_chars,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the chat template refuses these messages: {error}", param="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise TemplateFailed(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from None


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


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Offer a message's reasoning under all names that templates read it by (as transformers does)."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_tools(chat: Chat, tools: list[dict[str, Any]]) -> Chat:
    """The chat with the tools in its system message, as JSON text; the message is added if there is none."""
    first, rest = ({"role": "system", "content": ""}, chat) if chat[0].get("role") != "system" else (chat[0], chat[1:])
    return [{**first, "tools": _tojson([tool["function"] for tool in tools])}, *rest]


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


# --- what a template expects of an assistant message that calls tools: found by trying, once -----
#
# Clients send such a message back with `content: null` and its arguments as JSON text. Qwen3's template looks for
# `</think>` in the content, so it must be a text; DeepSeek's writes the calls only if the content is none. Most
# templates write the arguments with `tojson`; some put the text unchanged between two marks. gpt-oss's refuses calls
# with both reasoning and content. Phi-4-mini's writes no calls: they become content, or the model would call again.

_NAME, _VALUE = "penstock_probe", "Waterwheel"
_ARGUMENTS = {"place": _VALUE}
_AS_PYTHON = str(_ARGUMENTS)[:8]  # an object that a template writes without `tojson`
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


_STYLES = (
    *(CallStyle(no_content, form) for form, no_content in product(get_args(Arguments), get_args(NoContent))),
    CallStyle(calls_as="content"),
)


def find_style(render: Callable[[Chat, list[dict[str, Any]]], str]) -> CallStyle:
    """The first style in which the template shows a complete call; the usual one if there is none.

    `render` renders messages and tools with the template, and raises ApiError if the template refuses them.
    """
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}

    def shows(style: CallStyle, **said: Any) -> bool:
        chat: Chat = [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": None, "tool_calls": [call], **said},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": _NAME, "content": "Here."},
        ]
        try:
            text = render([_with_reasoning_names(style.apply(message)) for message in chat], [_TOOL])
        except ApiError:
            return False
        return _shows_call(text, style)

    style = next((style for style in _STYLES if shows(style)), CallStyle())
    for content in get_args(Beside):
        tried = replace(style, content=content)
        if shows(tried, content="I look.") and shows(tried, content="I look.", reasoning="Hm."):
            return tried
    return style


def _shows_call(text: str, style: CallStyle) -> bool:
    if _VALUE not in text or _AS_PYTHON in text:
        return False
    text_twice = '{\\"place\\"'  # JSON text that the template has passed through `tojson` again
    return style.arguments == "object" or text_twice not in text


def _as_text(calls: list[Any]) -> str:
    """Past calls as a JSON array of names and arguments."""
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return _tojson([function for function in functions if isinstance(function, dict)])


def _with_text(call: Any) -> Any:
    """The call with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}}


# --- the sandbox ------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Computes nothing while it compiles: `{{ 9 ** 9 ** 9 }}` must be left to the process that can be killed."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        raise jinja2.nodes.Impossible


class _VariableFinder(jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads, like `find_undeclared_variables`, but computes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        raise jinja2.nodes.Impossible


class _SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)  # as in jinja2, so that `namespace(self=...)` works
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _SafeDict:
    """`dict(...)` and `dict.fromkeys(...)`; nothing else of the class is available."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _ToJson(Protocol):
    def __call__(self, value: Any, **options: Any) -> str: ...


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # nothing of a template is computed before it is rendered
    )
    environment.code_generator_class = _CodeGenerator
    environment.filters["tojson"] = cast(_ToJson, _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


def load_chat_template(checkpoint: Checkpoint, override: str, special_tokens: dict[str, Any]) -> ChatTemplate | None:
    """The template of --chat-template, else the checkpoint's, if any.

    Raises:
        ConfigError: if it cannot be read, or does not compile.
    """
    source = read_text(Path(override), "the chat template") if override else checkpoint.chat_template()
    return None if source is None else ChatTemplate(source, special_tokens)
