"""From a valid request to one that can be submitted: its prompts are tokens, its grammar has been read."""

from dataclasses import dataclass

from msgspec.structs import asdict

from penstock.frontend.errors import InvalidRequest, UnsupportedParameter
from penstock.frontend.grammars.reader import Grammar
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import ValidLogprobs, ValidRequest, check_drawable
from penstock.ipc.messages import SamplingParams

MAX_PROMPT_LOGPROBS = 1 << 19
"""Of all prompts of a request, best ones included: some 50 MB and a second of work while the answer is written."""


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """All that the engine is to be told of a request."""

    valid: ValidRequest
    prompts: list[list[int]]
    sampling: list[SamplingParams]  # of each prompt
    grammar: Grammar


def make_ready(
    valid: ValidRequest,
    prompts: list[list[int]],
    grammar: Grammar,
    tokenizer: TextTokenizer,
    warnings: list[str],
    *,
    is_strict: bool = False,
) -> ReadyRequest:
    """Fit what a client asked for to its prompts.

    What the client should be warned of is added to `warnings`; if `is_strict`, the first one refuses the request.

    Raises:
        ContextLengthExceeded: if a prompt is too long.
        InvalidParameter: if nothing is left to draw.
        InvalidRequest: if too much is to be told of the prompts.
        UnsupportedParameter: if `is_strict` and there is something to warn of.
    """
    _check_prompt_size(valid.logprobs, prompts, valid.n)
    warnings += (*valid.warnings, *grammar.warnings)
    if is_strict and warnings:
        raise UnsupportedParameter(warnings[0], param=warnings[0].partition(":")[0])
    bad_words = bad_word_tokens(valid.bad_words, tokenizer) if valid.bad_words else ()
    check_drawable(valid.sampling, bad_words)
    fields = asdict(valid.sampling) | {
        "bad_words": bad_words,
        "grammar": grammar.text,
        "grammar_bytes": grammar.num_bytes,
    }
    limits = [valid.max_tokens_after(len(prompt), is_strict=is_strict) for prompt in prompts]
    for limit in limits:
        if valid.max_tokens is not None and limit < valid.max_tokens:
            field, asked = valid.max_tokens_field, valid.max_tokens
            warnings.append(f"{field}: {limit} in place of {asked}, for more the context has no room")
    sampling = [SamplingParams(max_tokens=limit, **fields) for limit in limits]
    return ReadyRequest(valid, prompts, sampling, grammar)


def _check_prompt_size(asked: ValidLogprobs, prompts: list[list[int]], n: int) -> None:
    """Refuse to tell more of prompts than one answer should hold."""
    num_best = max(asked.prompt, asked.echo)
    total = sum(map(len, prompts)) * (1 + num_best) * n
    if num_best >= 0 and total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"log-probabilities of prompts: {total} are asked for ({1 + num_best} for each token of each choice), "
            f"at most {MAX_PROMPT_LOGPROBS} are told in one answer"
        )


def bad_word_tokens(words: tuple[str, ...], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell bad words, at the start of a text and behind a space.

    As in vLLM: the second spelling counts if it differs in its first token but not in length. Other spellings of
    the same text by other tokens are not found.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if bare:
            found[bare] = None
        if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
            found[spaced] = None
    return tuple(found)
