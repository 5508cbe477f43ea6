"""Schemas of the whole dialect: every answer that ends by itself is valid, and none gets stuck on its way."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from tests.parts.grammars.dialect import SCHEMAS, Schema, Writer
from tests.parts.grammars.small_tokenizers import EOS, byte_level, pieces


@pytest.fixture(scope="module", params=[byte_level, pieces], ids=["byte_level", "pieces"])
def writer(request: pytest.FixtureRequest) -> Writer:
    tokenizer = request.param()
    return Writer(LLTokenizer(tokenizer.to_str(), eos_token=[tokenizer.token_to_id(EOS)]))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
@example({"type": ["number", "null"], "exclusiveMinimum": -1, "multipleOf": 3600}, 0)  # of a large automaton
def test_answers_that_end_are_valid_and_none_is_stuck(writer: Writer, schema: Schema, seed: int) -> None:
    writer.check(schema, seed)
