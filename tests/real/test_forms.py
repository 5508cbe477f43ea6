"""Structured output on the tokenizers of trained models: schemas of the whole dialect, at random."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.checkpoint.finding.registry import open_checkpoint
from penstock.core.checkpoint.grammar_tokens import grammar_vocabulary
from tests.faults.soak import sized
from tests.frontend.grammars.dialect import SCHEMAS, Schema, Writer
from tests.real.fetched import gemma3, only_real, smollm2, the_file

pytestmark = only_real


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def writer(request: pytest.FixtureRequest) -> Writer:
    return Writer(grammar_vocabulary(open_checkpoint(the_file(request.param))))


@pytest.mark.timeout(sized(300, 3600))
@settings(
    max_examples=sized(200, 4000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_answers_that_end_are_valid_and_none_is_stuck(writer: Writer, schema: Schema, seed: int) -> None:
    writer.check(schema, seed)
