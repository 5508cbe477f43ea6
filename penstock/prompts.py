"""The forms of prompts: texts, token ids, chats; one or many."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard, cast

from penstock.frontend.errors import InvalidParameter

Messages = Sequence[Mapping[str, Any]]
"""A chat's messages with `role` and `content`, as the chat completions API takes them."""


class TextPrompt(TypedDict):
    """A text, in vLLM's form."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, in vLLM's form."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the other arguments of the chat template."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Messages | Chat


def read_prompt(prompt: Prompt) -> str | list[int] | Chat:
    """One prompt, in one of three forms.

    Raises:
        InvalidParameter: if it has another form.
    """
    if isinstance(prompt, Chat):
        return _checked(prompt)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
            raise InvalidParameter(
                f"a prompt that is a dict has the key 'prompt' or 'prompt_token_ids' alone, got {sorted(prompt)}",
                param="prompt",
            )
        return read_prompt(cast("Prompt", next(iter(prompt.values()))))
    if is_chat(prompt):
        return Chat(prompt)
    token_ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # arrays of numpy, tensors of torch
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes | bytearray):
        raise InvalidParameter(f"a prompt is a text, token ids or a chat, got {type(prompt).__name__}", param="prompt")
    return list(token_ids)


def _checked(chat: Chat) -> Chat:
    messages: object = chat.messages
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidParameter(f"a chat is a list of messages, got {type(messages).__name__}", param="messages")
    for message in messages:
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise InvalidParameter(f"a message is a dict with role and content, got {kind}", param="messages")
    return chat


def is_chat(prompt: object) -> TypeGuard[Messages]:
    """Whether this is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def each_prompt(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """The prompts of a batch; a single prompt is a batch of one."""
    is_array = hasattr(prompts, "tolist") and getattr(prompts, "ndim", 0) == 1
    is_ids = is_array or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))
    if isinstance(prompts, str | Mapping | Chat) or is_ids or is_chat(prompts):
        return [cast("Prompt", prompts)]
    return cast("Iterable[Prompt]", prompts)
