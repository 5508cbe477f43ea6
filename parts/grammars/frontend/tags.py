"""Structural tags: text that is free until a tag begins, whose content has a form up to its end.

The format is xgrammar's, which vLLM and SGLang take; `validation/grammar.py` turns the older form into it:

    const_string, regex, json_schema, any_text     what stands there
    sequence, or                                   one after the other, or one of them
    tag                                            a content between a beginning and an end
    triggered_tags                                 free text; where a trigger is written, one of the tags goes on
    tags_with_separator                            tags alone, with a text between them

Beginnings and ends may contain tokens that are marks of their own. Free text has neither these nor triggers in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.parsing.calls.rules import Rules, quoted, sequence
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.grammar import GrammarSource

T = TypeVar("T")

_MAX_DEPTH = 32
_MAX_TAGS = 256


def as_calls(source: GrammarSource, tokenizer: TextTokenizer) -> GrammarSource:
    """A structural tag as the grammar of an output.

    Raises:
        InvalidParameter: it is not in its format.
        UnsupportedParameter: it has a form that is not supported.
    """
    rules = Rules(tokenizer)
    start = expression(rules, source)
    text = msgspec.json.encode([rules.lark(start), rules.schemas, None, rules.texts]).decode()
    return replace(source, kind="calls", text=text)


def expression(rules: Rules, source: GrammarSource) -> str:
    """The Lark expression of a structural tag; adds its rules. Raises the same errors."""
    tags = _Tags(rules, source.field)
    return rules.rule(tags.of(msgspec.json.decode(source.text), "format", 0) or '""')


@dataclass(frozen=True, slots=True)
class _Tag:
    begin: str
    content: dict[str, Any]
    ends: list[str]  # one of them


class _Tags:
    """Reads one structural tag."""

    def __init__(self, rules: Rules, field: str) -> None:
        self._rules = rules
        self._field = field
        self._marks = sorted(rules.tokenizer.added_texts, key=len, reverse=True)  # tokens of their own, never as text
        self._num_tags = 0

    def of(self, form: Any, at: str, depth: int, ends: tuple[str, ...] = ()) -> str:
        """The expression of a form. With `ends`, one of these follows, and belongs to it; else it may be the end."""
        if depth > _MAX_DEPTH:
            raise InvalidParameter(f"{self._field}: {at} is nested too deeply", param=self._field)
        kind = self._get(form, "type", str, at)
        read: dict[str, Callable[[Any, str, int, tuple[str, ...]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag_form,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        if kind not in read:
            raise UnsupportedParameter(
                f"{self._field}: {at}.type {kind[:64]!r} is not supported; supported: {', '.join(read)}",
                param=self._field,
            )
        return read[kind](form, at, depth, ends)

    # --- what stands there ---------------------------------------------------------------------

    def _const_string(self, form: Any, at: str, _depth: int, ends: tuple[str, ...]) -> str:
        return sequence(self._written(self._get(form, "value", str, at)), self._end(ends))

    def _json_schema(self, form: Any, at: str, _depth: int, ends: tuple[str, ...]) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise self._wrong(f"{at}.json_schema", "a JSON schema")
        return sequence(self._rules.json({} if schema is True else schema), self._end(ends))  # type: ignore[arg-type]

    def _regex(self, form: Any, at: str, _depth: int, ends: tuple[str, ...]) -> str:
        pattern = self._get(form, "pattern", str, at)
        plain = [end for end in ends if not self._has_mark(end)]
        others = [end for end in ends if end not in plain]
        each = [self._rules.text_ending(pattern, end) for end in plain]
        each += [sequence(self._rules.text_ending(pattern, ""), self._written(end)) for end in others]
        return self._one_of(each) if each else self._rules.text_ending(pattern, "")

    def _any_text(self, form: Any, at: str, _depth: int, ends: tuple[str, ...]) -> str:
        excludes = self._texts(form, "excludes", at)
        plain = [end for end in ends if not self._has_mark(end)]
        others = [end for end in ends if end not in plain]
        leads = [self._lead(end, f"{at}: an end") for end in others]
        text = f"{self._rules.text_without(*plain, *leads, *excludes)}?"
        each = [self._rules.text_to(plain, [*leads, *excludes])] if plain else []
        each += [sequence(text, self._written(end)) for end in others]
        return self._one_of(each) if each else text

    # --- several -------------------------------------------------------------------------------

    def _sequence(self, form: Any, at: str, depth: int, ends: tuple[str, ...]) -> str:
        elements = self._get(form, "elements", list, at)
        if not elements:
            raise self._wrong(f"{at}.elements", "at least one form")
        for i, element in enumerate(elements[:-1]):
            if isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags"):
                raise UnsupportedParameter(
                    f"{self._field}: {at}.elements[{i}]: free text may only be the last element", param=self._field
                )
        parts = [self.of(each, f"{at}.elements[{i}]", depth + 1) for i, each in enumerate(elements[:-1])]
        last = len(elements) - 1
        return sequence(*parts, self.of(elements[last], f"{at}.elements[{last}]", depth + 1, ends))

    def _or(self, form: Any, at: str, depth: int, ends: tuple[str, ...]) -> str:
        elements = self._get(form, "elements", list, at)
        if not elements:
            raise self._wrong(f"{at}.elements", "at least one form")
        return self._one_of(
            [self.of(each, f"{at}.elements[{i}]", depth + 1, ends) or '""' for i, each in enumerate(elements)]
        )

    def _tag_form(self, form: Any, at: str, depth: int, ends: tuple[str, ...]) -> str:
        tag = self._read_tag(form, at)
        return sequence(self._written(tag.begin), self._inside(tag, at, depth), self._end(ends))

    def _triggered(self, form: Any, at: str, depth: int, ends: tuple[str, ...]) -> str:
        if ends:
            raise UnsupportedParameter(f"{self._field}: {at}: triggered_tags may not be in a tag", param=self._field)
        triggers = self._texts(form, "triggers", at)
        tags = [
            (tag, self._read_tag(tag, f"{at}.tags[{i}]")) for i, tag in enumerate(self._get(form, "tags", list, at))
        ]
        if not triggers or not tags:
            raise self._wrong(f"{at}.triggers and {at}.tags", "at least one each")
        for one in triggers:
            if any(one in other and one != other for other in triggers):
                raise InvalidParameter(
                    f"{self._field}: {at}: trigger {one[:64]!r} is in another one", param=self._field
                )
        excludes = [
            *self._texts(form, "excludes", at),
            *(self._lead(each, at) for each in triggers if self._has_mark(each)),
        ]
        text = f"{self._rules.text_without(*triggers, *excludes)}?"
        each: dict[str, list[str]] = {}  # by what comes before
        for i, (_, tag) in enumerate(tags):
            trigger = next((trigger for trigger in triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                what = f"{at}.tags[{i}].begin {tag.begin[:64]!r} begins with no trigger"
                raise InvalidParameter(f"{self._field}: {what}", param=self._field)
            before, rest = text, tag.begin
            if not tag.begin.startswith(tuple(self._marks)):
                others = [other for other in triggers if other != trigger]
                before, rest = self._rules.text_to([trigger], [*others, *excludes]), tag.begin[len(trigger) :]
            inside = self._inside(tag, f"{at}.tags[{i}]", depth)
            each.setdefault(before, []).append(sequence(self._written(rest), inside) or '""')
        block = self._rules.rule(" | ".join(f"{before} {self._one_of(rest)}" for before, rest in each.items()))
        at_least_one = self._flag(form, "at_least_one", at)
        if self._flag(form, "stop_after_first", at):
            return block if at_least_one else self._one_of([block, text])
        return f"{block}{'+' if at_least_one else '*'} {text}"

    def _separated(self, form: Any, at: str, depth: int, ends: tuple[str, ...]) -> str:
        tags = [self._read_tag(tag, f"{at}.tags[{i}]") for i, tag in enumerate(self._get(form, "tags", list, at))]
        if not tags:
            raise self._wrong(f"{at}.tags", "at least one tag")
        each = [
            sequence(self._written(tag.begin), self._inside(tag, f"{at}.tags[{i}]", depth)) or '""'
            for i, tag in enumerate(tags)
        ]
        tag = self._rules.rule(" | ".join(each))
        separator = self._written(self._get(form, "separator", str, at))
        whole = tag if self._flag(form, "stop_after_first", at) else f"{tag} ({sequence(separator, tag)})*"
        return sequence(whole if self._flag(form, "at_least_one", at) else f"({whole})?", self._end(ends))

    # --- tags ----------------------------------------------------------------------------------

    def _read_tag(self, form: Any, at: str) -> _Tag:
        self._num_tags += 1
        if self._num_tags > _MAX_TAGS:
            raise InvalidParameter(f"{self._field} may have at most {_MAX_TAGS} tags", param=self._field)
        content = self._get(form, "content", dict, at)
        end = form.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise self._wrong(f"{at}.end", "a text, or a list of texts")
        return _Tag(self._get(form, "begin", str, at), content, [*dict.fromkeys(ends)])

    def _inside(self, tag: _Tag, at: str, depth: int) -> str:
        """A tag's content and end."""
        if tag.ends == [""]:
            return self.of(tag.content, f"{at}.content", depth + 1)
        if "" in tag.ends:
            raise UnsupportedParameter(f"{self._field}: {at}.end: only all ends may be empty", param=self._field)
        return self.of(tag.content, f"{at}.content", depth + 1, tuple(tag.ends))

    def _end(self, ends: tuple[str, ...]) -> str:
        return self._one_of([self._written(end) for end in ends]) if ends else ""

    # --- texts ---------------------------------------------------------------------------------

    def _has_mark(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)

    def _lead(self, text: str, what: str) -> str:
        """The mark with which a text with marks begins."""
        lead = next((mark for mark in self._marks if text.startswith(mark)), "")
        if not lead:
            raise UnsupportedParameter(
                f"{self._field}: {what} with a special token must begin with it: {text[:64]!r}", param=self._field
            )
        return lead

    def _written(self, text: str) -> str:
        """A text with its marks; "" if it is empty."""
        marks = [mark for mark in self._marks if mark in text]
        return self._rules.marks(text, *marks) if marks else quoted(text) if text else ""

    def _one_of(self, each: list[str]) -> str:
        return each[0] if len(each) == 1 else f"({' | '.join(each)})"

    # --- what clients send ---------------------------------------------------------------------

    def _get(self, form: Any, name: str, kind: type[T], at: str) -> T:
        if not isinstance(form, dict):
            raise self._wrong(at, "an object")
        found = form.get(name)
        if not isinstance(found, kind):
            raise self._wrong(f"{at}.{name}", {str: "a text", list: "a list", dict: "an object"}[kind])  # type: ignore[index]
        return found

    def _texts(self, form: Any, name: str, at: str) -> list[str]:
        found = form.get(name)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
            raise self._wrong(f"{at}.{name}", "a list of texts that are not empty")
        return found

    def _flag(self, form: Any, name: str, at: str) -> bool:
        found = form.get(name)
        if not isinstance(found, bool | None):
            raise self._wrong(f"{at}.{name}", "true or false")
        return bool(found)

    def _wrong(self, at: str, wanted: str) -> InvalidParameter:
        return InvalidParameter(f"{self._field}: {at} must be {wanted}", param=self._field)
