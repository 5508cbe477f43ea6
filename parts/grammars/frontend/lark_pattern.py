"""Turns a Lark grammar without recursion into one regular expression.

A custom tool's input is written as a JSON string, in which quotes and line breaks are escaped. The grammar library can
enforce a regular expression within such a string, but no rules; so rules are put in the places where they are named.
"""

import re
from collections.abc import Iterator

from penstock.parts.grammars.limits import MAX_PATTERN_CHARACTERS

_MAX_WRITTEN = 1 << 20
"""Characters that may be written for it altogether: rules that name each other grow with every level."""

_MAX_NAME = 64

_TOKEN = re.compile(
    r"""
    (?P<prefix> (?:(?<=\n)|^)[ \t]*[!?](?=_*[A-Za-z]) )
  | (?P<space> [ \t\r]+ | (?://|\#)[^\n]* )
  | (?P<line> \n )
  | (?P<string> "(?:[^"\\\n]|\\.)*"i? )
  | (?P<regex> /(?:[^/\\\n]|\\.)+/[imslux]* )
  | (?P<repeat> ~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)? )
  | (?P<range> \.\. )
  | (?P<alias> ->[ \t]*\w+ )
  | (?P<import> %import[ \t][^\n]* )
  | (?P<other> %\w+ )
  | (?P<name> _*[A-Za-z][A-Za-z0-9_]* )
  | (?P<priority> \.-?[0-9]+ )
  | (?P<mark> [:|()\[\]?*+] )
    """,
    re.VERBOSE,
)

_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Lark's `common` terminals."""


class NoPatternError(Exception):
    """The grammar cannot be written as a regular expression; says why."""


def pattern_of(lark: str) -> str:
    """A regular expression, without anchors, for the texts that match a Lark grammar.

    Raises:
        NoPatternError: the grammar refers to itself, is too large, is no Lark, or has more than rules, terminals and
            imports of `common`.
    """
    try:
        return _Rules(lark).pattern("start")
    except RecursionError:
        raise NoPatternError("it is nested too deeply") from None


Token = tuple[str, str]
"""Its kind, as in `_TOKEN`, and its text."""


class _Rules:
    """All rules of a grammar, and the expressions of those that were needed."""

    def __init__(self, lark: str) -> None:
        self._bodies: dict[str, list[Token]] = {}
        self._patterns: dict[str, str] = {}
        self._open: set[str] = set()
        self._num_written = 0
        self._tokens: list[Token] = []
        self._at = 0
        self._collect(list(_tokens(lark)))

    def pattern(self, name: str) -> str:
        """The expression of a rule."""
        if name in self._patterns:
            return self._patterns[name]
        if name in self._open:
            raise NoPatternError(f"{name[:_MAX_NAME]!r} refers to itself")
        if name not in self._bodies:
            raise NoPatternError(f"there is no rule {name[:_MAX_NAME]!r}")
        self._open.add(name)
        around, self._tokens, self._at = (self._tokens, self._at), self._bodies[name], 0
        found = self._choice()
        if self._at < len(self._tokens):
            raise _not_understood(self._tokens[self._at])
        self._tokens, self._at = around
        self._open.remove(name)
        self._patterns[name] = f"(?:{found})"
        return self._patterns[name]

    def _collect(self, tokens: list[Token]) -> None:
        """Split the grammar into rules: each begins with a name and a colon."""
        starts = [
            index
            for index, (kind, _) in enumerate(tokens)
            if kind == "name" and _is_definition(tokens[index + 1 : index + 3])
        ]
        for kind, text in tokens[: starts[0] if starts else len(tokens)]:
            self._directive(kind, text)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            name = tokens[start][1]
            if name in self._bodies:
                raise NoPatternError(f"{name[:_MAX_NAME]!r} is defined twice")
            colon = tokens.index(("mark", ":"), start)
            body = tokens[colon + 1 : end]
            for kind, text in [token for token in body if token[0] in ("import", "other")]:
                self._directive(kind, text)
            self._bodies[name] = [token for token in body if token[0] != "import"]

    def _directive(self, kind: str, text: str) -> None:
        if kind != "import":
            raise _not_understood((kind, text))
        found = re.fullmatch(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*", text)
        if found is None:
            raise NoPatternError("only terminals of 'common' can be imported")
        names = [(found[1], found[2] or found[1])] if found[1] else [(n, n) for n in re.findall(r"\w+", found[3])]
        for name, alias in names:
            if name not in _COMMON:
                raise NoPatternError(f"common.{name[:_MAX_NAME]} is not known")
            self._patterns[alias] = f"(?:{_COMMON[name]})"

    def _choice(self) -> str:
        """Alternatives, up to a closing bracket or the end."""
        found = [self._sequence()]
        while self._next() == ("mark", "|"):
            self._at += 1
            found.append(self._sequence())
        return self._written("|".join(found))

    def _sequence(self) -> str:
        found = []
        while (token := self._next()) is not None and token not in (("mark", "|"), ("mark", ")"), ("mark", "]")):
            self._at += 1
            if token[0] != "alias":
                found.append(self._repeated(self._single(token)))
        return self._written("".join(found))

    def _repeated(self, pattern: str) -> str:
        following = self._next()
        if following in (("mark", "?"), ("mark", "*"), ("mark", "+")):
            self._at += 1
            return f"(?:{pattern}){following[1]}"
        if following is not None and following[0] == "repeat":
            self._at += 1
            bounds = ",".join(re.findall("[0-9]+", following[1]))
            return f"(?:{pattern}){{{bounds}}}"
        return pattern

    def _single(self, token: Token) -> str:
        kind, text = token
        if kind == "name":
            return self._written(self.pattern(text))
        if kind == "string":
            value, is_any_case = _unquoted(text)
            if self._next() == ("range", ".."):
                self._at += 2
                end = self._tokens[self._at - 1] if self._at <= len(self._tokens) else token
                last, _ = _unquoted(end[1]) if end[0] == "string" else ("", False)
                if len(value) != 1 or len(last) != 1:
                    raise _not_understood(token)
                return f"[{re.escape(value)}-{re.escape(last)}]"
            return f"(?i:{_escaped(value)})" if is_any_case else _escaped(value)
        if kind == "regex":
            source, _, flags = text[1:].rpartition("/")
            if "x" in flags:
                raise _not_understood(token)
            return f"(?{''.join(sorted(set(flags) & set('ims')))}:{_without_slashes(source)})"
        if token in (("mark", "("), ("mark", "[")):
            inner = self._choice()
            closing = ")" if text == "(" else "]"
            if self._next() != ("mark", closing):
                raise NoPatternError(f"a {text!r} is not closed")
            self._at += 1
            return f"(?:{inner})" if text == "(" else f"(?:{inner})?"
        raise _not_understood(token)

    def _next(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _written(self, pattern: str) -> str:
        self._num_written += len(pattern)
        if len(pattern) > MAX_PATTERN_CHARACTERS or self._num_written > _MAX_WRITTEN:
            raise NoPatternError("it is too large")
        return pattern


def _not_understood(token: Token) -> NoPatternError:
    return NoPatternError(f"{token[1][:_MAX_NAME]!r} is not understood")


def _tokens(lark: str) -> Iterator[Token]:
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            raise NoPatternError(f"{lark[at : at + 16]!r} is not understood")
        at = found.end()
        if found.lastgroup not in ("prefix", "space", "line"):
            yield str(found.lastgroup), found[0]


def _is_definition(following: list[Token]) -> bool:
    """Whether a colon follows a name, perhaps after a priority."""
    kinds = [kind for kind, _ in following]
    return following[:1] == [("mark", ":")] or (kinds[:1] == ["priority"] and following[1:] == [("mark", ":")])


def _unquoted(text: str) -> tuple[str, bool]:
    """A string's value, and whether upper and lower case are the same."""
    body, _, flag = text[1:].rpartition('"')
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b"}

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1][1:], 16))
        return escapes.get(found[0][1], found[0][1])

    return re.sub(r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|.)", value, body), flag == "i"


def _escaped(text: str) -> str:
    """A text as a regular expression, with line breaks as escapes."""
    return "".join({"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(each, re.escape(each)) for each in text)


def _without_slashes(source: str) -> str:
    """A regular expression as it is without slashes around it."""
    return re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], source)
