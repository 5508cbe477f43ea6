"""The part of grammars on which the frontend, which checks them, and the worker, which uses them, must agree.

Both parse grammars with llguidance, with the same limits and tokens. The library is imported only if there is a
grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.options import ConfigError
from penstock.models.files.source import Checkpoint, eos_token_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_STATES = 20_000
"""States of the automaton that all copies of a matcher share; 1 to 2 kB each."""


def grammar_vocabulary(checkpoint: Checkpoint) -> LLTokenizer:
    """Return the checkpoint's tokens as grammars need them: their bytes, special ones, and the one that ends a text.

    Takes about half a second and 60 MB for 32,000 tokens.

    Raises:
        ConfigError: grammars do not support this kind of tokenizer.
    """
    import llguidance
    from tokenizers import Tokenizer

    try:
        source = checkpoint.tokenizer().decode()
        eos = list(eos_token_ids(checkpoint))
        if not eos:
            text = checkpoint.tokenizer_config.get("eos_token")
            text = text.get("content") if isinstance(text, dict) else text
            token_id = Tokenizer.from_str(source).token_to_id(text) if isinstance(text, str) else None
            eos = [] if token_id is None else [token_id]
        if not eos:
            raise ConfigError("the model has no end-of-sequence token, which ends a text that matches a grammar")
        return llguidance.LLTokenizer(source, eos_token=eos)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"grammars cannot be used with this model's tokenizer: {str(error)[:256]}") from None


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of a text; its `is_error` says whether the grammar is invalid.

    The limits keep the time for one mask to a few milliseconds, and the memory shared by a matcher and its copies to
    tens of megabytes, whatever the grammar.
    """
    import llguidance

    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=20_000,  # about 1 ms
        step_lexer_fuel=100_000,  # about 7 ms
        verbose_errors=False,
    )
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
