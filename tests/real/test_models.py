"""Trained models of the package index: each is fetched, and is a checkpoint that can be read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.parsing.detection import find_formats
from penstock.frontend.text.chat_template import ChatTemplate, load_chat_template
from penstock.frontend.text.template_facts import facts_of
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.models.finding.registry import open_checkpoint
from tests.real.conversations import CONVERSATIONS
from tests.real.fetched import gemma3, minilm, only_real, smollm2, the_file

pytestmark = only_real


@pytest.mark.parametrize("fetch", [smollm2, gemma3, minilm])
def test_it_is_a_checkpoint(fetch: Callable[[], Path]) -> None:
    checkpoint = open_checkpoint(the_file(fetch))
    assert checkpoint.tensors()
    assert load_tokenizer(checkpoint).vocab_size > 10_000


def test_a_chat_model_without_tools_in_its_template() -> None:
    """SmolLM2: tools are described in the system message, and calls are read in the form that is asked for."""
    checkpoint = open_checkpoint(the_file(smollm2))
    template = load_chat_template(checkpoint, "", load_tokenizer(checkpoint).special_tokens)
    assert isinstance(template, ChatTemplate)
    facts = facts_of(template)
    assert not facts.shows_tools
    assert find_formats(template.source, facts)[0].name == "generic"
    given = CONVERSATIONS["two calls, and on"]
    text = template.render(
        [message | {"content": message["content"] or ""} for message in given.messages], tools=[*given.tools]
    )
    assert [word for word in given.shows if word not in text] == []
