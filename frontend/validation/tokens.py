"""Checks of the fields that limit which tokens may be drawn: they name tokens, or words made of tokens."""

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.ipc.messages import SamplingParams

MAX_BAD_WORDS = 512
"""Each is two sequences of tokens, with and without a space before it, of which the engine takes 1,024."""

MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKEN_IDS = 4096


def check_drawable(sampling: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> None:
    """Refuse limits that leave no token to sample; `bad_words`: as token sequences, once these are known.

    Raises:
        InvalidParameter: naming the limits that conflict.
    """
    drawable, limits = set(sampling.allowed_token_ids), []
    if sampling.min_tokens and not drawable.isdisjoint(sampling.stop_token_ids):
        drawable.difference_update(sampling.stop_token_ids)
        limits.append(f"min_tokens ({sampling.min_tokens}) forbids those that stop")
    if banned := drawable.intersection(words[0] for words in bad_words if len(words) == 1):
        drawable -= banned
        limits.append("bad_words forbids some")
    if not drawable:
        raise InvalidParameter(
            f"allowed_token_ids leaves no token to sample: of its {len(sampling.allowed_token_ids)} tokens "
            f"{' and '.join(limits)}",
            param="allowed_token_ids",
        )


def check_token_ids(field: str, token_ids: list[int], vocab_size: int, max_count: int | None = None) -> list[int]:
    if max_count is not None and len(token_ids) > max_count:
        raise InvalidParameter(f"{field} may hold at most {max_count} ids, got {len(token_ids)}", param=field)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidParameter(
            f"{field}[{index}] must be a token id between 0 and {vocab_size - 1}, got {shown(token_ids[index])}",
            param=field,
        )
    return token_ids


def check_allowed_token_ids(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if not token_ids:
        raise InvalidParameter("allowed_token_ids is empty", param="allowed_token_ids")
    checked = check_token_ids("allowed_token_ids", token_ids, vocab_size, MAX_ALLOWED_TOKEN_IDS)
    return tuple(dict.fromkeys(checked))


def check_bad_words(words: list[str]) -> tuple[str, ...]:
    """Strings that must not be generated; they become token sequences in `bad_word_tokens`."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameter(
            f"bad_words may hold at most {MAX_BAD_WORDS} strings, got {len(words)}", param="bad_words"
        )
    check_texts("bad_words", [word if word.strip() else "" for word in words], MAX_BAD_WORD_CHARACTERS)
    return tuple(dict.fromkeys(words))


def bad_word_tokens(words: tuple[str, ...], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell bad words, at the start of a text and after a space.

    As in vLLM, the second spelling counts if it differs in its first token but not in length. Sequences of other tokens
    that spell the same text are not found.
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


def check_texts(field: str, texts: list[str], max_characters: int) -> None:
    for index, text in enumerate(texts):
        if not text:
            raise InvalidParameter(f"{field}[{index}] is empty", param=field)
        if len(text) > max_characters:
            raise InvalidParameter(
                f"{field}[{index}] may have at most {max_characters} characters, got {len(text)}", param=field
            )


def shown(value: int) -> str:
    """Format a number for a message: a client may send thousands of digits."""
    return str(value) if -(2**63) <= value < 2**64 else "a number beyond 64 bits"
