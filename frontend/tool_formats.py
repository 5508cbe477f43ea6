"""How models write tool calls, and which of these ways a chat template teaches."""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

_ALPHANUMERIC = string.ascii_letters + string.digits


def _openai_id() -> str:
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    """Mistral's templates refuse other ids than nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    `ends[mark]` is what closes a block that `mark` opened; empty if nothing does. `bare`: an object
    at the start of a line is a call too, if its name is that of an offered tool. `named_blocks`:
    after the mark may stand a name and then its arguments alone.
    """

    name: str
    ends: dict[str, str]
    bare: bool = False
    named_blocks: bool = False
    make_id: Callable[[], str] = _openai_id

    @property
    def starts(self) -> tuple[str, ...]:
        """The marks that open a block of calls."""
        return tuple(self.ends)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; a tokenizer may spell them as special tokens, which must then stay visible."""
        return (*self.ends, *(end for end in self.ends.values() if end))


HERMES = ToolFormat("hermes", {"<tool_call>": "</tool_call>"})
LLAMA3_JSON = ToolFormat("llama3_json", {"<|python_tag|>": ""}, bare=True)
MISTRAL = ToolFormat("mistral", {"[TOOL_CALLS]": ""}, named_blocks=True, make_id=_mistral_id)
GENERIC = ToolFormat(
    "generic",
    {
        "<tool_call>": "</tool_call>",
        "<function_call>": "</function_call>",
        "<|tool_call|>": "",
        "<|python_tag|>": "",
        "[TOOL_CALLS]": "",
    },
    bare=True,
    named_blocks=True,
)

TOOL_FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3_JSON, MISTRAL, GENERIC)}


def tool_format_of(template_source: str) -> ToolFormat:
    """The format whose marks a chat template shows; the generic one if it shows none that is known."""
    if "[TOOL_CALLS]" in template_source:
        return MISTRAL
    if "<tool_call>" in template_source and "<function=" not in template_source:
        return HERMES
    if "<|python_tag|>" in template_source or "<|start_header_id|>" in template_source:
        return LLAMA3_JSON
    return GENERIC
