"""Structural tags: free text until a trigger, then a tag's form up to its end, then free text again."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.frontend.errors import ApiError, InvalidParameter, UnsupportedParameter
from penstock.frontend.parsing.parser import OutputFormat
from penstock.frontend.parsing.reasoning import REASONING_FORMATS
from penstock.frontend.schema import ChatRequest, ResponseFormat, StructuredOutputs
from penstock.frontend.validation.common import Rules, SamplingDefaults, ValidRequest, validate_common
from penstock.models.grammar_tokens import make_matcher
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.frontend.tags import as_calls
from tests.parts.grammars.test_output_grammar import Model

WHERE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = {"begin": "<function=where>", "schema": WHERE, "end": "</function>"}
OTHER = {"begin": "<function=now>", "schema": {"type": "object", "additionalProperties": False}, "end": "</function>"}
OSLO = '<function=where>{"city": "Oslo"}</function>'


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def valid(response_format: Any = None, structured_outputs: Any = None) -> ValidRequest:
    rules = Rules(("m",), 1, 512, 384, (2,), SamplingDefaults())
    request = ChatRequest(response_format=response_format, structured_outputs=structured_outputs)
    return validate_common(request, rules, max_tokens=None)


class Tagged:
    """What a model may write with a structural tag."""

    def __init__(self, model: Model, response_format: ResponseFormat) -> None:
        source = valid(response_format).grammar
        assert source is not None
        source = as_calls(source, model.tokenizer)
        read = read_grammar(model.vocabulary, source.kind, source.text)
        assert not read.not_enforced
        self._matcher = make_matcher(model.vocabulary, read.text)
        self._tokenizer = model.tokenizer

    def takes(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        taken: int = matcher.try_consume_tokens(token_ids)
        return taken == len(token_ids) and bool(matcher.is_accepting())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tags") / "plain", [], special=False)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tags") / "special", ["<call>", "</call>"], special=True)


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tags") / "added", ["<call>", "</call>"], special=False)


def of(form: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat("structural_tag", format=form)


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<function="],
    "tags": [
        tag("<function=where>", {"type": "json_schema", "json_schema": WHERE}, "</function>"),
        tag("<function=note>", {"type": "any_text"}, ["</function>", "</note>"]),
    ],
}
CASES: list[tuple[str, dict[str, Any] | ResponseFormat, list[str], list[str]]] = [
    (
        "older form",
        ResponseFormat("structural_tag", structures=[CALL, OTHER], triggers=["<function="]),
        ["", "no call", f"I ask. {OSLO}", f"{OSLO}{OSLO} and\nmore", "<function=now>{}</function>", "a < b <func"],
        [
            "<function=",
            "<function=when>",
            '<function=where>{"city": 3}</function>',
            f"x{OSLO[:-1]}",
            "<function=now>{}",
        ],
    ),
    (
        "triggered",
        TRIGGERED,
        ["", "hello", f"x {OSLO} y {OSLO}", "<function=note>a <b>\n</note>!", "<function=note></function>"],
        ["<function=where>{}</function>", "<function=note>", "<function=x>"],
    ),
    ("at least one", TRIGGERED | {"at_least_one": True}, [OSLO, f"a {OSLO} b"], ["", "hello"]),
    ("one", TRIGGERED | {"stop_after_first": True}, ["", "hello", f"a {OSLO}"], [f"{OSLO} b", OSLO * 2]),
    (
        "exactly one",
        TRIGGERED | {"stop_after_first": True, "at_least_one": True},
        [OSLO, f"a {OSLO}"],
        ["", "a", OSLO * 2],
    ),
    ("excluded", TRIGGERED | {"excludes": ["bad"]}, ["good", f"ba {OSLO} d"], ["bad", f"a bad {OSLO}", f"{OSLO} bad"]),
    (
        "two triggers",
        {
            "type": "triggered_tags",
            "triggers": ["<a", "[b"],
            "tags": [
                tag("<a>", {"type": "const_string", "value": "1"}, "</a>"),
                tag("<ab>", {"type": "const_string", "value": "2"}, "</a>"),
                tag("[b]", {"type": "regex", "pattern": "[0-9/]+"}, "[/b]"),
            ],
        },
        ["x<a>1</a>y[b]12/3[/b]z", "<ab>2</a>", "[b]1[/b]<a>1</a>", "[ b"],
        ["<a>2</a>", "<ab>1</a>", "[b]x[/b]", "[b][/b]", "x[b]q<a>1</a>", "<a>1[b]"],
    ),
    (
        "sequence",
        {
            "type": "sequence",
            "elements": [
                tag("<think>", {"type": "any_text"}, "</think>"),
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "n+"}],
                },
                TRIGGERED,
            ],
        },
        ["<think></think>yes", f"<think>a <b></think>nn {OSLO}.", "<think>x</think>yes or no"],
        ["yes", "<think>yes", "<think></think>maybe", "<think></think>yes<function="],
    ),
    (
        "separated",
        {
            "type": "tags_with_separator",
            "separator": ", ",
            "tags": [tag("<", {"type": "json_schema", "json_schema": {"type": "integer"}}, ">")],
        },
        ["", "<1>", "<1>, <22>"],
        ["<1><2>", "<x>", "<1>, ", "hello"],
    ),
    ("tag without an end", tag("{", {"type": "regex", "pattern": "[ab]*"}, ""), ["{", "{abba"], ["", "{c", "x{a"]),
]


@pytest.mark.parametrize(("form", "taken", "refused"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_may_be_written(
    plain: Model, form: dict[str, Any] | ResponseFormat, taken: list[str], refused: list[str]
) -> None:
    tagged = Tagged(plain, form if isinstance(form, ResponseFormat) else of(form))
    assert [text for text in taken if not tagged.takes(text)] == []
    assert [text for text in refused if tagged.takes(text)] == []


def test_special_tokens(special: Model, added: Model) -> None:
    """Marks that are tokens: of their own kind, or as text."""
    calls = {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [
            tag("<call>\n", {"type": "json_schema", "json_schema": WHERE}, "\n</call>"),
            tag("<call>#", {"type": "any_text"}, "</call>"),
        ],
    }
    for model in (special, added):
        tagged = Tagged(model, of(calls))
        for text in ("", "hi", 'a<call>\n{"city": "Oslo"}\n</call> b<call># x</call>', "<call >"):
            assert tagged.takes(text), text
        for text in ("<call>", "<call>x</call>", '<call>\n{"city": 1}\n</call>', '<call>\n{"city": "a"}</call>'):
            assert not tagged.takes(text), text
        assert not tagged.takes("a </call>") or model is added  # which no tag has begun
        shorter = Tagged(model, of(calls | {"triggers": ["<ca"]}))
        assert shorter.takes('a<call>\n{"city": "Oslo"}\n</call>.')
        assert not shorter.takes("a<call>")


def test_with_reasoning_before(tmp_path: Path) -> None:
    """It is no part of the free text: triggers in it mean nothing."""
    thinking = Model(tmp_path / "thinking", ["<think>", "</think>"], special=False)
    output_format = OutputFormat(reasoning=REASONING_FORMATS["think"])
    common = valid(of(TRIGGERED | {"at_least_one": True}))
    assert thinking.takes(output_format, f"<think>so <function= </think>a {OSLO}", common)
    assert not thinking.takes(output_format, "<think>so</think>a", common)


def test_in_vllms_field(plain: Model) -> None:
    wanted = {"type": "structural_tag", "format": TRIGGERED}
    for given in (wanted, msgspec.json.encode(wanted).decode()):
        source = valid(structured_outputs=StructuredOutputs(structural_tag=given)).grammar
        assert source is not None
        assert source.field == "structured_outputs.structural_tag"
        assert as_calls(source, plain.tokenizer).text == as_calls(valid(of(TRIGGERED)).grammar, plain.tokenizer).text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "kind", "why"),
    [
        ({"type": "grammar", "grammar": "x"}, UnsupportedParameter, "format.type 'grammar' is not supported"),
        ({"type": "sequence", "elements": []}, InvalidParameter, "format.elements must be at least one form"),
        ({"type": "sequence", "elements": [{"type": "any_text"}] * 2}, UnsupportedParameter, "only be the last"),
        (TRIGGERED | {"triggers": ["<f"] * 0}, InvalidParameter, "at least one each"),
        (
            TRIGGERED | {"triggers": ["<x"]},
            InvalidParameter,
            r"tags\[0\].begin '<function=where>' begins with no trigger",
        ),
        (TRIGGERED | {"triggers": ["<f", "<"]}, InvalidParameter, "trigger '<' is in another one"),
        (TRIGGERED | {"at_least_one": 1}, InvalidParameter, "at_least_one must be true or false"),
        (tag("a", TRIGGERED, "b"), UnsupportedParameter, "triggered_tags may not be in a tag"),
        (tag("a", {"type": "any_text"}, None), InvalidParameter, "format.end must be a text, or a list of texts"),
        ({"type": "json_schema"}, InvalidParameter, "format.json_schema must be a JSON schema"),
        ({"type": 3}, InvalidParameter, "format.type must be a text"),
    ],
)
def test_what_is_refused(plain: Model, form: dict[str, Any], kind: type[ApiError], why: str) -> None:
    source = valid(of(form)).grammar
    assert source is not None
    with pytest.raises(kind, match=f"response_format: .*{why}"):
        as_calls(source, plain.tokenizer)


def test_nesting_is_bounded(plain: Model) -> None:
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(50):
        form = {"type": "sequence", "elements": [form]}
    source = valid(of(form)).grammar
    assert source is not None
    with pytest.raises(InvalidParameter, match="nested too deeply"):
        as_calls(source, plain.tokenizer)
