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
    validate_common,
)
from penstock.frontend.validation.tokens import check_token_ids

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
    suffix: str = ""  # the text after the gap that is to be filled in


def validate_completion(request: CompletionRequest, rules: Rules) -> ValidCompletion:
    """Check a completions request; see `validate_common`."""
    max_tokens = request.max_tokens
    is_prompt_only = max_tokens == 0 and bool(request.echo)
    if is_prompt_only:
        max_tokens = 1  # the engine samples at least one; it is not shown
    elif max_tokens is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
    num_best = check_num_best("logprobs", request.logprobs, rules)
    num_best_of_echo = num_best if request.echo else -1
    common = validate_common(
        request, rules, max_tokens=max_tokens, num_best=num_best, num_best_of_echo=num_best_of_echo
    )
    if request.prompt is None:
        raise InvalidParameter("prompt is required", param="prompt")
    prompts = valid_prompts("prompt", request.prompt, rules)
    if request.suffix:
        check_text_size("suffix", request.suffix, rules)
        if not isinstance(prompts[0], str):
            raise InvalidParameter("suffix needs prompts that are texts", param="suffix")
        if request.echo:
            raise InvalidParameter("echo and suffix exclude each other", param="suffix")
    return ValidCompletion(
        common=common,
        prompts=prompts,
        echo=bool(request.echo),
        is_prompt_only=is_prompt_only,
        add_special_tokens=request.add_special_tokens is not False,
        suffix=request.suffix or "",
    )


def valid_prompts(
    field: str, prompt: str | list[str | int | list[int]], rules: Rules, most: int | None = None
) -> list[str] | list[list[int]]:
    """Check a field that is a string, a list of strings, token ids, or a list of token id lists.

    Without `most`, there may be as many as --max-request-seqs allows, which is checked before they are tokenized.
    """
    if isinstance(prompt, str):
        check_text_size(field, prompt, rules)
        return [prompt]
    if not prompt:
        raise InvalidParameter(f"{field} is empty", param=field)
    kind = type(prompt[0])
    if most is not None and kind is not int and len(prompt) > most:
        raise InvalidParameter(f"{field} may hold at most {most} {field}s, got {len(prompt)}", param=field)
    if len(set(map(type, prompt))) > 1:
        index = next(i for i, part in enumerate(prompt) if type(part) is not kind)
        raise InvalidParameter(
            f"{field}[{index}] must be of the kind of {field}[0]: all strings, all token ids or all lists of token ids",
            param=field,
        )
    if kind is int:  # so are all others; there may be many, so no Python loop
        return [check_token_ids(field, cast("list[int]", prompt), rules.vocab_size)]
    texts = [part for part in prompt if isinstance(part, str)]
    for index, text in enumerate(texts):
        check_text_size(f"{field}[{index}]", text, rules)
    if texts:
        return texts
    lists = [part for part in prompt if isinstance(part, list)]
    for index, part in enumerate(lists):
        if not part:
            raise InvalidParameter(f"{field}[{index}] is empty", param=field)
        check_token_ids(f"{field}[{index}]", part, rules.vocab_size)
    return lists
