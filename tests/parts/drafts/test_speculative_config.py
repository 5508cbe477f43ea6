"""`--speculative-config`: what is accepted, and what is refused with which word."""

import json
from typing import Any

import pytest

from penstock.parts.drafts.speculative import speculative_config


def test_nothing_is_guessed_unless_it_is_asked_for() -> None:
    assert speculative_config("") is None
    found = speculative_config('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}')
    assert found is not None
    assert (found.method, found.num_speculative_tokens, found.prompt_lookup_max) == ("ngram", 3, 5)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("ngram", "JSON"),
        ("[]", "array"),
        ({}, "method"),
        ({"method": "magic"}, "magic"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min 5"),
        ({"method": "ngram", "model": "x"}, "model"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth"),
        ({"method": "suffix", "prompt_lookup_max": 8}, "prompt_lookup_max"),
        ({"method": "suffix", "suffix_decoding_max_cached_tokens": 5000}, "power of 2"),
        ({"method": "ngram", "disable_by_batch_size": 8}, "follows the load"),
        ({"method": "ngram", "lookahead": 8}, "lookahead"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any] | str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        speculative_config(given if isinstance(given, str) else json.dumps(given))
