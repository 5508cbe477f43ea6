"""Checks of completions requests: prompts, echo. See `common.py`."""

from dataclasses import dataclass
from typing import cast

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.schema import CompletionRequest
from penstock.frontend.validation.common import (
    Rules,
    ValidRequest,
    check_num_best,
    check_text_size,
    check_token_ids,
    validate_common,
)

MAX_PROMPTS = 128

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` for the older completions endpoint."""


@dataclass(frozen=True, slots=True)
class ValidCompletion:
    """A checked completions request; its texts are not tokenized yet."""

    common: ValidRequest
    prompts: list[str] | list[list[int]]
    echo: bool
    is_prompt_only: bool  # no output is wanted, only information about the prompt
    add_special_tokens: bool


def validate_completion(request: CompletionRequest, rules: Rules) -> ValidCompletion:
    """Check a completions request; see `validate_common`."""
    max_tokens = request.max_tokens
    is_prompt_only = max_tokens == 0 and bool(request.echo)
    if is_prompt_only:
        max_tokens = 1  # the engine samples one in any case; it is not shown
    elif max_tokens is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
    num_best = check_num_best("logprobs", request.logprobs, rules)
    num_best_of_echo = num_best if request.echo else -1
    common = validate_common(
        request, rules, max_tokens=max_tokens, num_best=num_best, num_best_of_echo=num_best_of_echo
    )
    if request.prompt is None:
        raise InvalidParameter("prompt is required", param="prompt")
    return ValidCompletion(
        common=common,
        prompts=_prompts(request.prompt, rules),
        echo=bool(request.echo),
        is_prompt_only=is_prompt_only,
        add_special_tokens=request.add_special_tokens is not False,
    )


def _prompts(prompt: str | list[str | int | list[int]], rules: Rules) -> list[str] | list[list[int]]:
    """A prompt is a string, a list of strings, token ids, or a list of token id lists."""
    if isinstance(prompt, str):
        check_text_size("prompt", prompt, rules)
        return [prompt]
    if not prompt:
        raise InvalidParameter("prompt is empty", param="prompt")
    kind = type(prompt[0])
    if kind is not int and len(prompt) > MAX_PROMPTS:
        raise InvalidParameter(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    if len(set(map(type, prompt))) > 1:
        index = next(i for i, part in enumerate(prompt) if type(part) is not kind)
        raise InvalidParameter(
            f"prompt[{index}] must be of the kind of prompt[0]: all strings, all token ids or all lists of token ids",
            param="prompt",
        )
    if kind is int:  # all are, and there may be many: no Python loop
        return [check_token_ids("prompt", cast("list[int]", prompt), rules.vocab_size)]
    texts = [part for part in prompt if isinstance(part, str)]
    for index, text in enumerate(texts):
        check_text_size(f"prompt[{index}]", text, rules)
    if texts:
        return texts
    lists = [part for part in prompt if isinstance(part, list)]
    for index, part in enumerate(lists):
        if not part:
            raise InvalidParameter(f"prompt[{index}] is empty", param="prompt")
        check_token_ids(f"prompt[{index}]", part, rules.vocab_size)
    return lists
