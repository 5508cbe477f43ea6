"""The grammar of a whole output: reasoning first, then calls, structured output, or text.

    reasoning? (calls | form)                  a forced choice leaves only calls, without tools only the form
    reasoning? text (call text)*               free text with calls of strict tools

`ToolFormat` knows how calls are written: as in the model's chat template. Constraints on the answer do not apply to the
reasoning before it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, sequence
from penstock.frontend.parsing.parser import OutputFormat, ValidTools
from penstock.frontend.parsing.reasoning import ReasoningFormat
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import ValidRequest
from penstock.frontend.validation.custom_tools import enforced_parameters
from penstock.frontend.validation.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from penstock.parts.grammars.frontend import tags
from penstock.parts.grammars.frontend.custom_patterns import patterns_of

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def bound(common: ValidRequest, output_format: OutputFormat, tokenizer: TextTokenizer) -> ValidRequest:
    """The request with the grammar of its output, if its form is constrained, calls are forced, or tools are strict.

    Raises:
        InvalidParameter: if the grammar would never let the output end.
    """
    tools = output_format.tools
    patterns, warnings = ({}, []) if tools is None else patterns_of(tools.inputs)
    grammar = _grammar(common, output_format, patterns, tokenizer)
    return replace(common, grammar=grammar, warnings=(*common.warnings, *warnings))


def _grammar(
    common: ValidRequest, output_format: OutputFormat, patterns: Mapping[str, str], tokenizer: TextTokenizer
) -> GrammarSource | None:
    """The grammar of the output; `patterns`: of the inputs of custom tools, as far as they can be enforced."""
    tools, form = output_format.tools, common.grammar
    if tools is not None and tools.is_forced:
        form = None  # only calls are allowed now
    has_patterns = any(patterns.values())
    if form is None and (tools is None or not (tools.is_forced or tools.has_strict or has_patterns)):
        return None
    field, what = form.field if form is not None else "", "a form"
    if tools is not None and (tools.is_forced or form is None):
        field, what = ("tool_choice", "a forced tool_choice") if tools.is_forced else ("tools", "a strict tool")
    if common.bad_words or common.user_stop_token_ids.issuperset(common.sampling.stop_token_ids):
        raise InvalidParameter(f"{what} excludes ignore_eos and bad_words", param=field)
    if tools is None and form is not None and (output_format.reasoning is None or output_format.is_reasoning_over):
        return form  # the form is the only constraint
    rules = Rules(tokenizer)
    try:
        functions, warnings = _functions(tools, patterns)
        whole, named = "", None
        if form is not None and form.kind == "tags":
            whole = tags.expression(rules, form)
        elif form is not None:
            whole, named = "form", [form.kind, form.text]
        start = _start(rules, output_format, functions, whole)
        text = msgspec.json.encode([rules.lark(start), rules.schemas, named, rules.texts]).decode()
        if rules.not_enforced:
            words = {"pattern": "pattern, as which grammars of custom tools are written"} if has_patterns else {}
            keywords = ", ".join(words.get(keyword, keyword[:32]) for keyword in list(rules.not_enforced)[:16])
            warnings.append(f"tools: this model's format for calls cannot enforce {keywords}")
    except RecursionError:
        raise InvalidParameter("tools: a schema is nested too deeply", param="tools") from None
    source = GrammarSource("calls", text, field, warnings=tuple(warnings))
    if form is not None:
        source = replace(source, schema=form.schema, is_strict=form.is_strict and tools is None)
    return source


def _functions(tools: ValidTools | None, patterns: Mapping[str, str]) -> tuple[list[Function], list[str]]:
    """Return the tools that may be called, and warnings: schemas that are too large are not enforced."""
    functions: list[Function] = []
    warnings: list[str] = []
    room = MAX_GRAMMAR_BYTES
    for function in tools.functions if tools is not None else ():
        assert tools is not None
        arguments = _ANY_ARGUMENTS
        pattern = patterns.get(function["name"])
        if pattern is not None:
            arguments = enforced_parameters(pattern)
        elif tools.is_forced or function.get("strict"):
            arguments = function.get("parameters") or _NO_ARGUMENTS
        if arguments is not _ANY_ARGUMENTS:
            room -= len(msgspec.json.encode(arguments))
            if room < 0:
                arguments = _ANY_ARGUMENTS
                warnings.append(
                    f"tools: the schema of {function['name']!r} is not enforced: schemas may have "
                    f"{MAX_GRAMMAR_BYTES} bytes together"
                )
        functions.append(Function(function["name"], arguments))
    return functions, warnings


def _start(rules: Rules, output_format: OutputFormat, functions: list[Function], form: str) -> str:
    tools, tool_format = output_format.tools, output_format.tool_format
    reasoning, has_form = _reasoning(rules, output_format), bool(form)
    if output_format.reasoning is not None and output_format.reasoning.has_channels:
        final = sequence(rules.mark("<|channel|>"), quoted("final"), rules.mark("<|message|>"))
        form = sequence(final, form or f"{rules.text_without()}?")
        if tools is None or tool_format is None:
            return sequence(reasoning, form)
        calls = tool_format.calls_rule(rules, functions, parallel=False)
        return sequence(reasoning, calls if tools.is_forced else f"({calls} | {form})")
    form = _answer(rules, output_format, form)
    if tools is None or tool_format is None:
        return sequence(reasoning, form)
    if not (tools.is_forced or has_form):
        return sequence(reasoning, tool_format.text_rule(rules, functions, parallel=tools.parallel))
    calls = tool_format.calls_rule(rules, functions, parallel=tools.parallel)
    return sequence(reasoning, f"({rules.rule(calls)} | {form})" if has_form else calls)


def _reasoning(rules: Rules, output_format: OutputFormat) -> str:
    """What may, or must, come before the answer."""
    marks = output_format.reasoning
    if marks is None:
        return ""
    if marks.has_channels:
        head = sequence(rules.mark("<|channel|>"), quoted("analysis"), rules.mark("<|message|>"))
        next_message = sequence(rules.mark("<|start|>"), quoted("assistant"))
        return f"({head} {rules.text_until('<|end|>')} {next_message})*"
    if output_format.is_reasoning_over:
        return ""
    space = rules.terminal(r"/[ \t\r\n]{1,8}/")
    inside = f"{_until(rules, marks)} {space}?"
    if output_format.is_reasoning_open:
        return inside
    opening = sequence(_mark(rules, marks, marks.start), quoted(marks.label) if marks.label else "")
    before = f"{rules.terminal('/[ ]/')}? " if marks.tokens else ""  # a name may follow the prompt without a blank
    # A model may also begin with the end mark, which says that it does not reason.
    return f"({before}{opening} {inside} | {_mark(rules, marks, marks.end)} {space}?)?"


def _mark(rules: Rules, marks: ReasoningFormat, text: str) -> str:
    return rules.marks(text, *marks.tokens) if marks.tokens else rules.mark(text)


def _until(rules: Rules, marks: ReasoningFormat) -> str:
    """Any text up to the mark that ends reasoning, and that mark."""
    first = next((token for token in marks.tokens if marks.end.startswith(token)), "")
    if first and rules.tokenizer.token_id(first) is not None:
        return f"{rules.text_without(first)}? {_mark(rules, marks, marks.end)}"
    return rules.text_until(marks.end)


def _answer(rules: Rules, output_format: OutputFormat, form: str) -> str:
    """A form, with the marks that models of several tokens each must write around it."""
    marks = output_format.reasoning
    if not form or marks is None or not marks.tokens or marks.answer is None:
        return form
    opening, closing = (_mark(rules, marks, mark) for mark in marks.answer)
    tail = f"({_mark(rules, marks, marks.tail)})?" if marks.tail else ""
    blank = f"{rules.terminal('/[ ]/')}?"
    return sequence("" if output_format.is_answer_open else f"{blank} {opening}", form, f"({closing} {tail})?")
