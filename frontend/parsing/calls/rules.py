"""Collects the rules of a grammar of calls: Lark, and JSON schemas that it refers to by name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.frontend.parsing.calls.block import Kinds
from penstock.frontend.text.tokenizer import TextTokenizer

_DESCRIPTIONS = frozenset(
    (
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"),
        *("example", "examples", "nullable", "readOnly", "title", "writeOnly"),
    )
)
"""Keywords of JSON schemas that are not constraints by themselves."""


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as a grammar sees it."""

    name: str
    arguments: dict[str, Any]
    """The JSON schema that a call's arguments must match."""


@dataclass(slots=True)
class Rules:
    """The collected rules. Expressions are Lark; named rules are added once and referred to by name."""

    tokenizer: TextTokenizer
    lines: list[str] = field(default_factory=list)
    schemas: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By name: a schema, and the one to use instead if it cannot be used."""
    texts: dict[str, tuple[str, str, str, str]] = field(default_factory=dict)
    """By name: a regular expression for a text; one for what follows it and one for all that it is not part of, in
    Lark's form; and the expression to use instead if the first one cannot be used."""
    inner: str = ""
    """A mark that is part of other marks, and may be a token of its own."""
    not_enforced: dict[str, None] = field(default_factory=dict)
    """Keywords of schemas that the grammar has no rule for, in the order in which they were found."""
    kinds: Kinds = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    """Ids of the schemas of which it was noted what is not enforced."""
    _names: dict[str, str] = field(default_factory=dict)
    _owners: dict[int, Any] = field(default_factory=dict)

    def mark(self, mark: str) -> str:
        """A mark: as a token if it is one, else as text."""
        token_id = self.tokenizer.token_id(mark)
        if token_id is not None:
            return f"<[{token_id}]>"
        return self.marks(mark, self.inner) if self.inner and self.inner in mark[:-1] else quoted(mark)

    def marks(self, text: str, *marks: str) -> str:
        """Text that contains marks."""
        found = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", text)
        return " ".join(self.mark(part) if part in marks else quoted(part) for part in found if part)

    def json(self, schema: dict[str, Any], instead: dict[str, Any] | None = None) -> str:
        """JSON that matches a schema. If the schema cannot be used: JSON that matches `instead`, or any object."""
        key = msgspec.json.encode(schema).decode()
        if key not in self._names:
            self._names[key] = f"json_{len(self.schemas)}"
            self.schemas[self._names[key]] = (schema, {"type": "object"} if instead is None else instead)
        return self._names[key]

    def rule(self, body: str, options: str = "") -> str:
        """A named rule for an expression that is used several times."""
        return self._named("rule", body, options)

    def terminal(self, body: str) -> str:
        """A named terminal for a regular expression."""
        return self._named("TERM", body, "")

    def text_without(self, *marks: str) -> str:
        """Any non-empty text without these marks."""
        without = "".join(rf" & ~/(.|\n)*{regex(mark)}(.|\n)*/" for mark in marks)
        return self.terminal(rf"/(.|\n)+/{without}")

    def text_until(self, mark: str, then: str = "", before: str = "") -> str:
        """Any text, perhaps empty, up to and including a mark, with the text `before` and `then` around the mark."""
        if self.tokenizer.token_id(mark) is not None:
            return f"{self.text_without(mark)}? {self.mark(mark)}" + (f" {quoted(then)}" if then else "")
        if self.inner and self.inner in mark and self.tokenizer.token_id(self.inner) is not None:
            head, _, tail = mark.partition(self.inner)
            # The lexer does not backtrack: text and every beginning of `head` are lexemes of their own.
            text = self.terminal(f"/[^{regex(head[0])}]+/")
            pieces = f"({' | '.join([text, *(quoted(head[:i]) for i in range(1, len(head) + 1))])})*"
            return sequence(pieces, quoted(head), self.mark(self.inner), quoted(tail + then))
        return self.rule(rf"/(.|\n)*{regex(before + mark + then)}/", "[lazy]")

    def text_to(self, ends: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Any text, perhaps empty, up to and including the first of some marks, none of which is a token."""
        without = "".join(rf" & ~/(.|\n)*{regex(mark)}(.|\n)*/" for mark in excludes)
        return self.rule(rf"/(.|\n)*({'|'.join(map(regex, ends))})/{without}", "[lazy]")

    def text_ending(self, pattern: str, end: str) -> str:
        """A text that matches a regular expression as a whole, and the text behind it, which comes nowhere before.

        If the expression cannot be used: any text, and that behind it.
        """
        if end:
            return self._text(pattern, regex(end), rf"(.|\n)*{regex(end)}(.|\n)+", self.text_to([end]))
        return self._text(pattern, "", regex("\0"), f"{self.text_without()}?")

    def text_like(self, pattern: str, mark: str, then: str = "", before: str = "") -> str:
        """As `text_until`, of a text that matches a regular expression as a whole; empty if that cannot be said."""
        instead = self.text_until(mark, then, before)
        if self.tokenizer.token_id(mark) is not None:
            without = rf"(.|\n)*{regex(mark)}(.|\n)*"
            return f"{self._text(pattern, regex(before), without, self.text_without(mark) + '?')} {self.mark(mark)}" + (
                f" {quoted(then)}" if then else ""
            )
        if self.inner and self.inner in mark:
            return ""
        end = regex(before + mark + then)
        return self._text(pattern, end, rf"(.|\n)*{end}(.|\n)+", instead)

    def _text(self, pattern: str, end: str, without: str, instead: str) -> str:
        key = f"text {pattern} {end}"
        if key not in self._names:
            self._names[key] = f"text_{len(self.texts)}"
            self.texts[self._names[key]] = (pattern, end, without, instead)
        return self._names[key]

    def text_until_line(self, beginning: str) -> str:
        """Any text up to a line that begins with this regular expression, and that beginning."""
        return self.rule(rf"/((.|\n)*\n)?[ \t\r]*{beginning}/", "[lazy]")

    def text_without_lines(self, beginning: str, *marks: str) -> str:
        """Any non-empty text without these marks in which no line begins with this regular expression."""
        without = "".join(rf" & ~/(.|\n)*{regex(mark)}(.|\n)*/" for mark in marks)
        blank = r"[ \t\r]*"
        return self.terminal(rf"/(.|\n)+/ & ~/((.|\n)*\n)?{blank}{beginning}(.|\n)*/{without}")

    def leave_out(self, schema: dict[str, Any], known: frozenset[str] = frozenset()) -> None:
        """Note the keywords that are not enforced: all except the `known` ones and those that only describe."""
        self.not_enforced.update(dict.fromkeys(sorted(schema.keys() - known - _DESCRIPTIONS)))

    def leave_out_of_open(self, schema: dict[str, Any]) -> None:
        """Note what is not enforced in an object whose keys its schema does not name."""
        said = {name: schema.get(name) for name in ("additionalProperties", "required")}
        self.leave_out({name: value for name, value in said.items() if value and value is not True})

    def recursive(self, key: str, body: Callable[[str], str], owner: Any = None) -> str:
        """A rule that may refer to itself; `body` makes its expression from its name, and is called once for a key.

        Each owner has keys of its own: tools may give different definitions the same name.
        """
        self._owners[id(owner)] = owner  # kept, so that no other object gets its id
        key = f"{id(owner)} {key}"
        if key not in self._names:
            self._names[key] = name = f"rule_{len(self._names)}"
            self.lines.append(f"{name}: {body(name)}")
        return self._names[key]

    def lark(self, start: str) -> str:
        """All rules as Lark source; a text must match `start`."""
        return "\n".join([f"start: {start}", *self.lines])

    def _named(self, kind: str, body: str, options: str) -> str:
        key = f"{kind}{options} {body}"
        if key not in self._names:
            self._names[key] = f"{kind}_{len(self._names)}"
            self.lines.append(f"{self._names[key]}{options}: {body}")
        return self._names[key]


def quoted(text: str) -> str:
    """A text as a Lark string."""
    return msgspec.json.encode(text).decode()


NEW_LINE = quoted("\n")


def sequence(*parts: str) -> str:
    """Expressions one after the other; empty ones are left out."""
    return " ".join(part for part in parts if part)


def repeated(call: str, separator: str, *, parallel: bool) -> str:
    """A call, or several with a text between them."""
    return f"{call} ({sequence(quoted(separator) if separator else '', call)})*" if parallel else call


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def listed(rules: Rules, items: list[tuple[str, bool]], separator: str) -> str:
    """Items (expression, whether it is required) in their order, with a separator between those that are present."""
    first = more = '""'  # an empty text
    for item, is_needed in reversed(items):
        behind = rules.rule(f"{quoted(separator)} {item} {more}") if more != '""' else f"{quoted(separator)} {item}"
        this = f"{item} {more}" if more != '""' else item
        if is_needed:
            first, more = rules.rule(this), behind
        else:
            first, more = rules.rule(f"{this} | {first}"), rules.rule(f"{behind} | {more}")
    return first
