"""Checks of what a request wants to know of tokens' probabilities, and of the tokens that it bans or allows."""

from dataclasses import dataclass

from penstock.frontend.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.frontend.schema import ChatRequest, CompletionRequest, SamplingRequest
from penstock.frontend.schema_responses import LOGPROBS, ResponsesRequest
from penstock.frontend.text.tokenizer import TextTokenizer

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 19
"""Of all prompts of a request, best ones included: some 50 MB and a second of work while the answer is written."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_ALLOWED_TOKEN_IDS = 4096


@dataclass(frozen=True, slots=True)
class ValidLogprobs:
    """What is told of how many best tokens: -1 is nothing, 0 the token itself alone."""

    output: int = -1
    prompt: int = -1  # in vLLM's `prompt_logprobs`
    echo: int = -1  # with an echoed prompt
    as_token_ids: bool = False

    @property
    def asks(self) -> bool:
        """Anything is told at all."""
        return max(self.output, self.prompt) >= 0


def validate_logprobs(request: SamplingRequest, vocab_size: int) -> ValidLogprobs:
    """Read the fields of the request's kind.

    Raises:
        InvalidParameter: if a number is out of bounds, or they do not go together.
    """
    if isinstance(request, ChatRequest):
        return _chat(request, vocab_size)
    if isinstance(request, CompletionRequest):
        return _completion(request, vocab_size)
    if isinstance(request, ResponsesRequest):
        return _response(request, vocab_size)
    return _with_prompt(request, vocab_size, output=-1)


def _chat(request: ChatRequest, vocab_size: int) -> ValidLogprobs:
    """`logprobs` is a switch, `top_logprobs` the number."""
    num_best = _number_of_best("top_logprobs", request.top_logprobs, vocab_size)
    if num_best > 0 and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs to be true", param="top_logprobs")
    return _with_prompt(request, vocab_size, output=max(num_best, 0) if request.logprobs else -1)


def _completion(request: CompletionRequest, vocab_size: int) -> ValidLogprobs:
    """`logprobs` is the number; it holds for an echoed prompt too."""
    num_best = _number_of_best("logprobs", request.logprobs, vocab_size)
    return _with_prompt(request, vocab_size, output=num_best, echo=num_best if request.echo else -1)


def _response(request: ResponsesRequest, vocab_size: int) -> ValidLogprobs:
    """`include` is the switch, and a number of best ones is too."""
    num_best = max(_number_of_best("top_logprobs", request.top_logprobs, vocab_size), 0)
    is_wanted = num_best > 0 or LOGPROBS in (request.include or ())
    return _with_prompt(request, vocab_size, output=num_best if is_wanted else -1)


def _with_prompt(request: SamplingRequest, vocab_size: int, *, output: int, echo: int = -1) -> ValidLogprobs:
    prompt = _number_of_best("prompt_logprobs", request.prompt_logprobs, vocab_size)
    if prompt >= 0 and request.stream:
        raise InvalidParameter("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    return ValidLogprobs(output, prompt, echo, bool(request.return_tokens_as_token_ids))


def _number_of_best(field: str, value: int | None, vocab_size: int) -> int:
    if value is None:
        return -1
    most = min(MAX_LOGPROBS, vocab_size)
    if not 0 <= value <= most:
        shown = value if -(2**63) <= value < 2**64 else "a number beyond 64 bits"
        raise InvalidParameter(f"{field} must be between 0 and {most}, got {shown}", param=field)
    return value


def check_prompt_size(asked: ValidLogprobs, prompts: list[list[int]], n: int) -> None:
    """Refuse to tell more of prompts than one answer should hold.

    Raises:
        InvalidRequest: naming the limit and what was asked for.
    """
    num_best = max(asked.prompt, asked.echo)
    total = sum(map(len, prompts)) * (1 + num_best) * n
    if num_best >= 0 and total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"log-probabilities of prompts: {total} are asked for ({1 + num_best} for each token of each choice), "
            f"at most {MAX_PROMPT_LOGPROBS} are told in one answer"
        )


def check_best_of(request: SamplingRequest, n: int, max_n: int) -> int:
    """How many sequences are generated for `n` answers; more than `n` for whole completions only."""
    best_of = request.best_of
    if best_of is None or best_of == n:
        return n
    if not isinstance(request, CompletionRequest):
        raise UnsupportedParameter(f"best_of must equal n, got best_of={best_of} and n={n}", param="best_of")
    if not n <= best_of <= max_n:
        shown = best_of if -(2**63) <= best_of < 2**64 else "a number beyond 64 bits"
        raise InvalidParameter(f"best_of must be between n ({n}) and {max_n}, got {shown}", param="best_of")
    if request.stream:
        raise InvalidParameter(
            "best_of larger than n is not available when stream is true: the best is known at the end", param="best_of"
        )
    return best_of


def check_bad_words(words: list[str] | None) -> tuple[str, ...]:
    """Texts that must not be generated; they become token sequences in `bad_word_tokens`."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameter(f"bad_words may hold {MAX_BAD_WORDS} texts at most, got {len(words)}", param="bad_words")
    for index, word in enumerate(words):
        if not word.strip():
            raise InvalidParameter(f"bad_words[{index}] is empty", param="bad_words")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidParameter(
                f"bad_words[{index}] may have {MAX_BAD_WORD_CHARACTERS} characters at most, got {len(word)}",
                param="bad_words",
            )
    return tuple(dict.fromkeys(words))


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


def check_truncation(value: int | None, max_model_len: int) -> int | None:
    """How many of a prompt's last tokens are kept: -1 for as many as fit, None for all."""
    if value is None or value == -1:
        return value
    if not 1 <= value <= max_model_len:
        shown = value if -(2**63) <= value < 2**64 else "a number beyond 64 bits"
        raise InvalidParameter(
            f"truncate_prompt_tokens must be -1 or between 1 and {max_model_len}, got {shown}",
            param="truncate_prompt_tokens",
        )
    return value
