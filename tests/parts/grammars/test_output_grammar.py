"""What a model may write: for each tool format, what its template writes of right calls, and nothing else."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.parsing.calls.parser import ToolCallParser
from penstock.frontend.parsing.calls.values import kinds_of
from penstock.frontend.parsing.parser import OutputFormat, ValidTools, parse_message
from penstock.frontend.parsing.reasoning import REASONING_FORMATS
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS
from penstock.frontend.schema import ChatRequest, JsonSchemaFormat, ResponseFormat
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.frontend.validation.common import Rules, SamplingDefaults, ValidRequest, validate_common
from penstock.frontend.validation.custom_tools import as_function
from penstock.frontend.validation.grammar import GrammarSource
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.frontend.custom_patterns import patterns_of
from penstock.parts.grammars.frontend.output_grammar import bound
from tests.faults.soak import sized
from tests.frontend.checkpoint_folder import byte_level_tokenizer, write_checkpoint
from tests.frontend.pieces import collected
from tests.frontend.tool_templates import TEMPLATES

THINK = REASONING_FORMATS["think"]
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}},
    "required": ["x"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "p": {"$ref": "#/$defs/Point"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "words": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
GOOD: list[dict[str, Any]] = [
    {"city": "Oslo", "days": 3},
    {"city": 'Tromsø: a "b"\nc', "days": -1, "exact": True, "p": {"x": 3, "next": {"x": 4, "next": None}}},
    {"city": "", "days": 0, "unit": "F", "words": ["a", "b"]},
]
BAD: list[dict[str, Any]] = [
    {"city": "Oslo", "days": "three"},
    {"city": "Oslo"},
    {"city": "Oslo", "days": 3, "unit": "K"},
    {"city": "Oslo", "days": 3, "other": 1},
    {"city": "Oslo", "days": 3, "p": {"x": "3"}},
]
FORM = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
NAMES = list(TEMPLATES)


class Model:
    """A checkpoint's tokens, with or without tokens of their own for marks."""

    def __init__(self, folder: Path, marks: list[str], *, special: bool) -> None:
        tokenizer = byte_level_tokenizer()
        if special:
            tokenizer.add_special_tokens(marks)
        else:
            tokenizer.add_tokens(marks)
        folder.mkdir(exist_ok=True)
        write_checkpoint(folder, tokenizer=tokenizer)
        self.tokenizer = load_tokenizer(open_checkpoint(folder))
        self.vocabulary = grammar_vocabulary(open_checkpoint(folder))
        self._matchers: dict[str, Any] = {}

    def takes(self, output_format: OutputFormat, text: str, common: ValidRequest | None = None) -> bool:
        """Whether the model may write this text, and end with it."""
        source = bound(common or request(), output_format, self.tokenizer).grammar
        assert source is not None
        known = self._matchers.get(source.text)
        if known is None:
            grammar = read_grammar(self.vocabulary, source.kind, source.text).text
            known = self._matchers[source.text] = make_matcher(self.vocabulary, grammar)
        matcher = known.deep_copy()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken: int = matcher.try_consume_tokens(token_ids)
        assert not matcher.is_error(), matcher.get_error()
        return taken == len(token_ids) and bool(matcher.is_accepting())


def request(response_format: ResponseFormat | None = None) -> ValidRequest:
    rules = Rules(("m",), 1, 512, 384, (2,), SamplingDefaults())
    return validate_common(ChatRequest(response_format=response_format), rules, max_tokens=None)


def form_request() -> ValidRequest:
    return request(ResponseFormat("json_schema", JsonSchemaFormat("answer", schema=FORM)))


def form_of(
    name: str, *, forced: bool = False, parallel: bool = True, strict: bool = True, **options: Any
) -> OutputFormat:
    """The format of an output with a strict tool `f` and a tool `g`."""
    function = {"name": "f", "parameters": PARAMETERS, "strict": strict}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    tool_format = TOOL_FORMATS[name]
    if name == "harmony":
        options["reasoning"] = REASONING_FORMATS["harmony"]
    valid = ValidTools(tools, frozenset({"f", "g"}), parallel, tool_format, is_forced=forced)
    is_call_open = tool_format.is_opened_by_prompt
    return OutputFormat(tools=valid, tool_format=tool_format, is_call_open=is_call_open, **options)


def written(name: str, *arguments: dict[str, Any], content: str = "") -> str:
    """Calls of `f` as the format's template writes them."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = ChatTemplate(TEMPLATES[name], {}).render([message], add_generation_prompt=False)
    if name == "functionary_v32":
        return text.removeprefix(">>>")  # the prompt has written it
    return text.removesuffix("<|call|>") if name == "harmony" else text  # that one is a stop token


class Models:
    """A checkpoint for each format: its marks are special tokens, other tokens, or text."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self.kind = kind
        self._made: dict[str, Model] = {}

    def of(self, name: str) -> Model:
        if name not in self._made:
            marks = [] if self.kind == "text" else [*TOOL_FORMATS[name].marks, *THINK.marks]
            self._made[name] = Model(self._folder / name, marks, special=self.kind == "special")
        return self._made[name]


@pytest.fixture(scope="module", params=["special", "tokens", "text"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("name", NAMES)
def test_forced_calls(models: Models, name: str) -> None:
    model = models.of(name)
    forced = form_of(name, forced=True)
    for arguments in GOOD:
        assert model.takes(forced, written(name, arguments).strip()), arguments
    for arguments in BAD[:-1] if name == "minimax_m3" else BAD:  # it writes "3" and 3 alike
        assert not model.takes(forced, written(name, arguments).strip()), arguments
    assert not model.takes(forced, "")
    assert not model.takes(forced, "Hello")
    single = form_of(name, forced=True, parallel=False)
    assert model.takes(single, written(name, GOOD[0]).strip())
    if name != "harmony":  # which makes one call
        assert model.takes(forced, written(name, GOOD[0], GOOD[1]).strip())
        assert not model.takes(single, written(name, GOOD[0], GOOD[0]).strip())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_free_calls_of_strict_tools(models: Models, name: str) -> None:
    model = models.of(name)
    free = form_of(name)
    for content in ("", "Hello <b>, {there}\n[1]"):
        assert model.takes(free, written(name, content=content or "x")), content
        assert model.takes(free, written(name, GOOD[0], content=content).strip()), content
        for arguments in BAD[:2]:
            assert not model.takes(free, written(name, arguments, content=content).strip()), content


@pytest.mark.parametrize("name", NAMES)
def test_calls_or_a_form(models: Models, name: str) -> None:
    """With tools and a response format the output is calls, or text of the form."""
    model = models.of(name)
    both = form_of(name)
    plain = form_of(name, strict=False)
    answer = '{"answer": 42}'
    if name == "harmony":
        answer = f"<|channel|>final<|message|>{answer}"
    for output_format in (both, plain):
        assert model.takes(output_format, answer, form_request())
        assert model.takes(output_format, written(name, GOOD[0]).strip(), form_request())
        assert not model.takes(output_format, "Hello", form_request())
        assert not model.takes(output_format, answer.replace("42", '"no"'), form_request())
    assert not model.takes(both, written(name, BAD[0]).strip(), form_request())
    forced = form_of(name, forced=True)
    assert not model.takes(forced, answer, form_request())
    assert model.takes(forced, written(name, GOOD[0]).strip(), form_request())


REASONED = [name for name in NAMES if name not in ("harmony", "functionary_v32")]


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_before_calls_and_forms(models: Models, name: str) -> None:
    model = models.of(name)
    call = written(name, GOOD[0]).strip()
    for is_open, before in ((False, "<think>\nHm, {1}.\n</think>\n\n"), (True, "Hm, {1}.\n</think>\n\n")):
        options: dict[str, Any] = {"reasoning": THINK, "is_reasoning_open": is_open}
        forced = form_of(name, forced=True, **options)
        assert model.takes(forced, before + call)
        assert not model.takes(forced, before)
        assert not model.takes(forced, before + "Hello")
        assert model.takes(forced, call) == (not is_open)  # it must think if the prompt has begun to
        assert model.takes(form_of(name, **options), before + '{"answer": 42}', form_request())
        assert not model.takes(form_of(name, **options), before + '{"answer": ""}', form_request())
        assert model.takes(form_of(name, **options), before + written(name, GOOD[0], content="I look.\n"))
    closed = form_of(name, forced=True, reasoning=THINK, is_reasoning_over=True)
    assert model.takes(closed, call)
    assert not model.takes(closed, f"<think>Hm.</think>{call}")


def test_reasoning_before_a_form_without_tools(models: Models) -> None:
    model = models.of("hermes")
    common = form_request()
    opened = OutputFormat(reasoning=THINK, is_reasoning_open=True)
    assert model.takes(opened, 'Hm.\n</think>\n\n{"answer": 42}', common)
    assert not model.takes(opened, '{"answer": 42}', common)
    maybe = OutputFormat(reasoning=THINK)
    assert model.takes(maybe, '{"answer": 42}', common)
    assert model.takes(maybe, '<think>Hm.</think>{"answer": 42}', common)
    for kind, text, good, bad in (
        ("regex", "[a-c]+/x", "abc/x", "d"),
        ("choice", '["yes", "no"]', "yes", "maybe"),
        ("grammar", 'start: "a" b\nb: "b" | "c"\n', "ac", "aa"),
        ("grammar", 'root ::= "a" b\nb ::= "b" | "c"\n', "ac", "aa"),
    ):
        source = GrammarSource(kind, text, "structured_outputs")  # type: ignore[arg-type]
        wanted = request()
        wanted = type(wanted)(**{name: getattr(wanted, name) for name in wanted.__slots__} | {"grammar": source})
        assert model.takes(maybe, f"<think>Hm.</think>{good}", wanted), kind
        assert model.takes(maybe, good, wanted), kind
        assert not model.takes(maybe, f"<think>Hm.</think>{bad}", wanted), kind


def test_harmony_reasons_before_what_is_asked(models: Models) -> None:
    model = models.of("harmony")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"answer": 42}'
    channels = OutputFormat(reasoning=REASONING_FORMATS["harmony"])
    assert model.takes(channels, thought + final, form_request())
    assert model.takes(channels, final, form_request())
    assert not model.takes(channels, thought + "<|channel|>final<|message|>Hello", form_request())
    free = form_of("harmony")
    assert model.takes(free, thought + "<|channel|>final<|message|>Hello")
    assert model.takes(free, written("harmony", GOOD[0]))
    assert not model.takes(free, written("harmony", BAD[0]))
    forced = form_of("harmony", forced=True)
    assert model.takes(forced, thought + written("harmony", GOOD[0]))
    assert not model.takes(forced, thought + final)


def test_tools_that_are_not_strict_bring_no_grammar(models: Models) -> None:
    model = models.of("hermes")
    common = request()
    assert bound(common, form_of("hermes", strict=False), model.tokenizer).grammar is None
    assert bound(common, OutputFormat(), model.tokenizer).grammar is None
    forced = form_of("generic", forced=True, strict=False)
    assert bound(common, forced, model.tokenizer).grammar is not None
    with_form = form_request()
    assert bound(with_form, OutputFormat(), model.tokenizer).grammar is with_form.grammar


def forced_calls_of(name: str, *parameters: dict[str, Any]) -> OutputFormat:
    """The format of an output that must call one of the tools `f0`, `f1`, ... with these parameters."""
    functions = [{"name": f"f{i}", "parameters": schema, "strict": True} for i, schema in enumerate(parameters)]
    tools = [{"type": "function", "function": function} for function in functions]
    names = frozenset(str(function["name"]) for function in functions)
    valid = ValidTools(tools, names, parallel=True, tool_format=TOOL_FORMATS[name], is_forced=True)
    return OutputFormat(tools=valid, tool_format=TOOL_FORMATS[name])


def told(name: str, models: Models, *parameters: dict[str, Any]) -> str:
    source = bound(request(), forced_calls_of(name, *parameters), models.of(name).tokenizer).grammar
    assert source is not None
    return "; ".join(source.warnings)


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema as nobody should write it: every keyword with values of every type."""
    if depth > 3 or rng.random() < 0.2:
        return rng.choice([None, True, False, 5, -0.5, "string", "", [], {}, ["a", 1], "#/$defs/a", "\u2028/"])
    keywords = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "items", "properties", "required", "$ref", "$defs")
    schema: dict[str, Any] = {}
    for keyword in rng.sample([*keywords, "additionalProperties", "pattern", "x-more"], rng.randint(0, 5)):
        kind = rng.random()
        if keyword == "type" and kind < 0.7:
            schema[keyword] = rng.choice(["string", "integer", "number", "boolean", "null", "array", "object"])
        elif keyword == "$ref" and kind < 0.7:
            schema[keyword] = rng.choice(["#", "#/$defs/a", "#/properties/a", "#/nowhere", "other"])
        elif keyword in ("properties", "$defs") and kind < 0.8:
            schema[keyword] = {key: random_schema(rng, depth + 1) for key in rng.sample(["a", 'b"\n', "", "é"], 2)}
        elif kind < 0.7 and keyword in ("anyOf", "oneOf", "allOf", "enum", "required"):
            schema[keyword] = [random_schema(rng, depth + 1) for _ in range(rng.randint(0, 2))]
        else:
            schema[keyword] = random_schema(rng, depth + 1)
    return schema


@pytest.mark.parametrize("name", NAMES)
def test_schemas_that_are_none(models: Models, name: str) -> None:
    """Whatever a client sends as a schema, the rules of its calls can be written, and its calls be read."""
    is_open = TOOL_FORMATS[name].is_opened_by_prompt
    for seed in range(sized(8, 25)):
        rng = random.Random(f"{name} {seed}")
        schema = random_schema(rng)
        if not isinstance(schema, dict):
            schema = {"properties": {"a": schema}}
        told(name, models, schema)
        parser = ToolCallParser(TOOL_FORMATS[name], {"f": schema}, is_open=is_open)
        text = written(name, {"a": "x", "b": 1})
        assert collected(parser.feed(text) + parser.finish())[2]


def test_what_cannot_be_enforced_is_told(models: Models) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^x", "description": "d"}, "b": {"type": "integer"}},
    }
    for name in ("qwen3_coder", "gemma4", "pythonic", "deepseek_v32"):
        assert told(name, models, schema).endswith("cannot enforce pattern")
    assert not told("qwen3_coder", models, PARAMETERS)
    assert not told("gemma4", models, PARAMETERS)
    large = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 70_000}}}
    for name in NAMES:
        assert "the schema of 'f1' is not enforced" in told(name, models, PARAMETERS, large)


def with_x(schema: dict[str, Any]) -> dict[str, Any]:
    """Parameters of which one, `x`, has this schema."""
    definitions = {"Word": {"type": "string"}, "Day": {"type": "integer"}}
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions}


@pytest.mark.parametrize(
    ("schema", "of_tags", "of_literals"),
    [
        ({"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}, "enum", ""),
        ({"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}, "pattern", "pattern"),
        ({"allOf": [{"$ref": "#/$defs/Word"}, {"enum": ["a"]}]}, "enum", "allOf"),
        ({"$ref": "#/$defs/Word", "enum": ["a"]}, "enum", "enum"),
        ({"$ref": "#/nowhere"}, "$ref", "$ref"),
        ({"enum": ["a", {"b": 1}]}, "", "enum"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "", "additionalProperties"),
        ({"properties": {"a": {"type": "integer"}}}, "", "properties"),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "", "type, required"),
        ({"$ref": "#/$defs/Word", "description": "d"}, "", ""),
    ],
    ids=str,
)
def test_what_parts_of_a_schema_cannot_be_enforced_is_told(
    models: Models, schema: dict[str, Any], of_tags: str, of_literals: str
) -> None:
    for name, keywords in (
        ("glm", of_tags),
        ("qwen3_coder", of_tags),
        ("pythonic", of_literals),
        ("gemma4", of_literals),
    ):
        said = told(name, models, with_x(schema))
        assert said.partition("cannot enforce ")[2] == keywords, name


def test_what_the_parameters_themselves_ask_for(models: Models) -> None:
    for name in ("glm", "qwen3_coder", "pythonic", "gemma4"):
        open_object = told(name, models, {"type": "object", "additionalProperties": {"type": "integer"}})
        assert open_object.endswith("cannot enforce additionalProperties"), name
        counted = told(name, models, {"type": "object", "properties": {"x": {}}, "minProperties": 1})
        assert counted.endswith("cannot enforce minProperties"), name


def test_definitions_of_the_same_name_in_two_tools(models: Models) -> None:
    tools = [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}}}
        for kind in ("integer", "string")
    ]
    for name, call, word in (
        ("pythonic", "[f{}(x={})]", "'a'"),
        ("lfm2", "<|tool_call_start|>[f{}(x={})]<|tool_call_end|>", "'a'"),
        ("gemma4", "<|tool_call>call:f{}{{x:{}}}<tool_call|>", '<|"|>a<|"|>'),
    ):
        form, model = forced_calls_of(name, *tools), models.of(name)
        for number, value, is_right in ((0, "1", True), (0, word, False), (1, "1", False), (1, word, True)):
            assert model.takes(form, call.format(number, value)) is is_right, (name, number, value)


def test_parameters_that_are_a_reference_themselves(models: Models) -> None:
    """Some generators of schemas put the object among the definitions, which it refers to."""
    properties = {"x": {"$ref": "#/$defs/Day"}}
    schema: dict[str, Any] = {"$ref": "#/$defs/All", "$defs": with_x({})["$defs"]}
    schema["$defs"]["All"] = {"type": "object", "properties": properties, "required": ["x"]}
    glm = "<tool_call>f0\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for name, call in (("pythonic", "[f0(x={})]"), ("glm", glm)):
        assert models.of(name).takes(forced_calls_of(name, schema), call.format("1")), name
        assert not models.of(name).takes(forced_calls_of(name, schema), call.format('"a"')), name


def test_strings_that_may_be_something_else(models: Models) -> None:
    """DeepSeek V3.2 says of each value whether it is a string, which only it knows if the schema allows both."""
    begin, end = (
        '<｜DSML｜invoke name="f0">\n<｜DSML｜parameter name="x" string=',
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
    )
    call = f'<｜DSML｜function_calls>\n{begin}"{{}}">{{}}{end}</｜DSML｜function_calls>'
    model = models.of("deepseek_v32")
    word_or_none = forced_calls_of("deepseek_v32", with_x({"type": ["string", "null"]}))
    anything = forced_calls_of("deepseek_v32", with_x({}))
    word = forced_calls_of("deepseek_v32", with_x({"type": "string"}))
    for form, is_either in ((word_or_none, True), (anything, True), (word, False)):
        assert model.takes(form, call.format("true", "null"))
        assert model.takes(form, call.format("false", "null")) is is_either


def test_a_pattern_of_strings_says_nothing_of_other_values(models: Models) -> None:
    model, pattern = models.of("qwen3_coder"), {"pattern": "^(?:a|b)$"}
    call = "<tool_call>\n<function=f0>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
    for kinds, is_either in (({"type": "string"}, False), ({"type": ["string", "null"]}, True), ({}, True)):
        form = forced_calls_of("qwen3_coder", with_x({**kinds, **pattern}))
        assert model.takes(form, call.format("b"))
        assert model.takes(form, call.format("null")) is is_either


def test_a_schema_that_refers_to_itself_very_often() -> None:
    schema = with_x({"$ref": "#/$defs/All"})
    schema["$defs"]["All"] = {"allOf": [{"$ref": "#/$defs/All"}] * 100}
    assert kinds_of(schema, "x") == frozenset()


class Counted(list[Any]):
    """A list that counts how often it is read."""

    num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "minimax_m2", "deepseek_v32", "pythonic", "gemma4"])
def test_a_large_definition_of_many_arguments_is_read_once(models: Models, name: str) -> None:
    """The event loop waits while a grammar is written, so the time must not grow with arguments times definitions."""
    for keyword, value in (("anyOf", {"type": "string"}), ("allOf", {}), ("enum", "word"), ("oneOf", {"enum": [1]})):
        parts = Counted([value] * 50)
        properties = {f"x{i}": {"$ref": "#/$defs/Large"} for i in range(50)}
        schema = {"type": "object", "properties": properties, "$defs": {"Large": {keyword: parts}}}
        source = bound(request(), forced_calls_of(name, schema), models.of(name).tokenizer).grammar
        assert source is not None
        assert parts.num_reads < 5, keyword
        assert source.text.count("word") < 300


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "minimax_m2", "deepseek_v32"])
def test_a_large_definition_of_many_calls_is_read_once(name: str) -> None:
    parts = Counted([{"type": "integer"}] * 50)
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Large"}}, "$defs": {"Large": {"anyOf": parts}}}
    output_format = forced_calls_of(name, schema)
    call = TOOL_FORMATS[name].example.replace("get_weather", "f0").replace("city", "x").replace("Oslo", "1")
    for _ in range(10):
        message = parse_message(output_format, call.replace('string="true"', 'string="false"') * 5, "stop")
        assert [each.arguments for each in message.calls] == ['{"x": 1}'] * 5
    assert parts.num_reads == 1


LINES = 'start: line+\nline: ("+" | "-") /.*/ LF?\n%import common.LF\n'
NOT_HELD = (
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m3",
    "function_gemma",
    "gemma3",
    "gemma4",
    "lfm2",
    "olmo3",
    "pythonic",
)
"""Formats that write a text between tags of several tokens, or as a word of a language, and have no rule for patterns:
the client is told."""
GOOD_INPUT, BAD_INPUT = '+a "b"\\n\n-<c> & d', "+a\n?b"


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_custom_tools(models: Models, name: str) -> None:
    """They are held to their grammar where the format has a rule for it, and come back as texts."""
    model = models.of(name)
    grammar = {"type": "grammar", "syntax": "lark", "definition": LINES}
    tool, wanted = as_function("tools[0].custom", {"name": "f", "format": grammar})
    assert patterns_of({"f": wanted})[1] == []
    forced = models.kind != "text"
    tools = ValidTools([tool], frozenset({"f"}), True, TOOL_FORMATS[name], forced, inputs={"f": wanted})
    output_format = replace(form_of(name), tools=tools)
    source = bound(request(), output_format, model.tokenizer).grammar
    assert source is not None
    told = any("pattern" in warning for warning in source.warnings)
    assert told == (name in NOT_HELD or (name == "kimi_k3" and models.kind == "text"))
    good, bad = (written(name, {"input": text}).strip() for text in (GOOD_INPUT, BAD_INPUT))
    assert model.takes(output_format, good)
    assert model.takes(output_format, bad) == told
    [call] = parse_message(output_format, good, "stop").calls
    assert (call.name, call.is_custom, call.arguments) == ("f", True, GOOD_INPUT)
