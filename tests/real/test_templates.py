"""Every published chat template: through a table of conversations, and its own calls and reasoning read back.

    make test-real FLAGS="-k templates"

With PENSTOCK_TABLE=FILE the outcome of each conversation on each template is written to that file, as Markdown.
"""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.api.text_model import TextModel
from penstock.frontend.errors import ApiError
from penstock.frontend.parsing.detection import output_format
from penstock.frontend.parsing.parser import OutputFormat, ValidTools
from penstock.frontend.schema import ChatRequest
from penstock.frontend.text.chat_template import Rendered
from penstock.frontend.text.template_facts import ANSWER, ARGUMENTS, THOUGHT, TOOLS, Turn
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.frontend.validation.chat import validate_chat
from penstock.frontend.validation.common import ValidRequest, validate_common
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.frontend.output_grammar import bound
from tests.frontend.checkpoint_folder import byte_level_tokenizer, write_checkpoint
from tests.frontend.pieces import assert_same_at_every_cut
from tests.real.conversations import CONVERSATIONS, Conversation
from tests.real.fetched import only_real
from tests.real.learned import RULES, SOURCES, learned, rules_of

pytestmark = only_real


REFUSED: dict[str, str] = {
    "an image": "the model reads no images; to leave one out would be to answer another question",
    "another role": "the template would drop the message, or refuses the role: no engine can show it",
}
"""Conversations that a template may refuse in a sentence, and why no engine could do better."""
_COMPACT = "its JSON has no blanks where ours has them; both are read"
_LINES = "it has no line break where the published format has one; both are read"
_PROMPT = "it writes a generation prompt behind the calls, whether it is asked to or not"
NOT_WRITTEN: dict[str, str] = {
    "openai-gpt-oss-120b": "its past calls name the role first, where models name the channel first",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": _COMPACT,
    "meetkai-functionary-medium-v3.2": _COMPACT,
    "StepFun3.5-Flash": _LINES,
    "Reka-Edge": _LINES,
    "inclusionai-ling-3.0-flash": _LINES,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": _PROMPT,
    "CohereForAI-c4ai-command-r-plus-tool_use": "it indents the objects, and writes its instructions behind them",
    "mistralai-Mistral-Nemo-Instruct-2407": "it shows the ids that the server made; models write none",
}
"""Templates whose past calls are not what grammars let the model write, though both are read, and why."""


def rendered(name: str, conversation: Conversation) -> Rendered:
    """What a server makes of a request."""
    template, rules = learned(name)[0], rules_of(name)
    request = ChatRequest(model="m", messages=list(conversation.messages), tools=list(conversation.tools) or None)
    return template.render_conversation(validate_chat(request, rules, template).conversation)


def outcome(name: str, kind: str) -> str:
    """ "shown", "refused: ..." or "lost: ..." """
    conversation = CONVERSATIONS[kind]
    try:
        prompt = rendered(name, conversation)
    except ApiError as error:
        return f"refused: {error.message}"
    lost = [word for word in conversation.shows if word not in prompt.text]
    if lost:
        return f"lost: {', '.join(lost)}"
    return f"shown, and told: {prompt.warnings[0]}" if prompt.warnings else "shown"


@pytest.mark.parametrize("name", SOURCES)
def test_every_conversation_is_shown(name: str) -> None:
    outcomes = {kind: outcome(name, kind) for kind in CONVERSATIONS}
    wrong = {
        kind: found
        for kind, found in outcomes.items()
        if found != "shown" and not (kind in REFUSED and found.startswith("refused"))
    }
    assert wrong == {}


def test_the_table() -> None:
    """Counts all outcomes, and writes them to a file if one is named."""
    table = {(name, kind): outcome(name, kind) for name in SOURCES for kind in CONVERSATIONS}
    counts = Counter(found.partition(":")[0] for found in table.values())
    assert counts["lost"] == 0
    if file := os.environ.get("PENSTOCK_TABLE"):
        lines = [f"{len(SOURCES)} templates, {len(CONVERSATIONS)} conversations each: {dict(counts)}", ""]
        lines += [f"| template | {' | '.join(CONVERSATIONS)} |", f"| --- |{' --- |' * len(CONVERSATIONS)}"]
        for name in SOURCES:
            lines.append(f"| {name} | {' | '.join(table[name, kind].partition(':')[0] for kind in CONVERSATIONS)} |")
        Path(file).write_text("\n".join(lines) + "\n")


# --- what the template writes is read back ----------------------------------------------------


def calls_of(name: str) -> tuple[Turn, int]:
    """A turn with calls as the template shows it, and how many there are."""
    _, facts, model = learned(name)
    if facts.calls is not None:
        return facts.calls, facts.num_calls
    calls = [{"type": "function", "function": {"name": called, "arguments": given}} for called, given in ARGUMENTS]
    assert model.tool_format is not None
    written = model.tool_format.written(calls)  # the template writes none, so it is done for it
    return Turn("", written), len(calls)


def form_of(turn: Turn, model: TextModel, **changes: Any) -> OutputFormat:
    assert model.tool_format is not None
    form = output_format(turn, model.tool_format, model.reasoning_format)
    names = frozenset(called for called, _ in ARGUMENTS)
    tools = [{**tool, "function": {**tool["function"], "strict": changes.pop("strict", False)}} for tool in TOOLS]
    valid = ValidTools(tools, names, True, model.tool_format, is_forced=changes.pop("forced", False))
    return replace(form, tools=valid)


@pytest.mark.parametrize("name", SOURCES)
def test_its_own_calls_are_read_back_at_every_cut(name: str) -> None:
    turn, count = calls_of(name)
    _, _, found = assert_same_at_every_cut(form_of(turn, learned(name)[2]), turn.text)
    assert [(called, json.loads(arguments)) for called, arguments in found] == list(ARGUMENTS[:count])


@pytest.mark.parametrize("name", SOURCES)
def test_its_own_reasoning_is_read_back_at_every_cut(name: str) -> None:
    _, facts, model = learned(name)
    if facts.reasoning is None or model.reasoning_format is None:
        pytest.skip("the template shows no past reasoning")
    form = form_of(facts.reasoning, model)
    text = facts.reasoning.text
    if not form.is_reasoning_open and model.reasoning_format.start not in text:
        text = f"{model.reasoning_format.start}{text}"  # it leaves out the mark that its prompt writes
    thought, content, calls = assert_same_at_every_cut(form, text)
    assert (thought, calls) == (THOUGHT, [])
    assert content.startswith(ANSWER)


_END = re.compile(r"\s*(<[|｜][^<>]*>|<[A-Z_0-9]+>)\s*$")


class Model:
    """A checkpoint whose tokenizer has a token for each mark of a format."""

    def __init__(self, folder: Path, marks: tuple[str, ...]) -> None:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens(list(marks))
        write_checkpoint(folder, tokenizer=tokenizer)
        checkpoint = open_checkpoint(folder)
        self.tokenizer, self._vocabulary = load_tokenizer(checkpoint), grammar_vocabulary(checkpoint)

    def takes(self, form: OutputFormat, text: str) -> bool:
        """Whether the grammar of this output lets the model write this text."""
        common: ValidRequest = validate_common(ChatRequest(), RULES, max_tokens=None)
        source = bound(common, form, self.tokenizer).grammar
        assert source is not None
        matcher = make_matcher(self._vocabulary, read_grammar(self._vocabulary, source.kind, source.text).text)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.try_consume_tokens(token_ids)
        return bool(taken == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize("how", ["forced", "strict"])
@pytest.mark.parametrize("name", SOURCES)
def test_grammars_let_the_model_write_its_own_calls(name: str, how: str, tmp_path: Path) -> None:
    if name in NOT_WRITTEN:
        pytest.skip(NOT_WRITTEN[name])
    turn, _ = calls_of(name)
    form = form_of(turn, learned(name)[2], **{how: True})
    text = turn.text
    while (end := _END.search(text)) and end[1] not in form.marks:  # a token that ends the turn
        text = text[: end.start()]
    assert Model(tmp_path, form.marks).takes(form, text.strip()), text
