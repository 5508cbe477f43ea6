"""The input of custom tools, which is a text: models write it as a function's only argument.

    {"input": "a \\"text\\"\\n"}   <-->   a "text"

Clients see neither the key nor JSON's escapes. What a model writes in another form is passed on as it is.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Part

INPUT = "input"
"""The name of the only argument."""

SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
"""Of the grammars that inputs may have to match."""

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_HEAD = 64
"""Characters after which it is decided whether arguments begin as expected."""

_PLAIN = re.compile(r'[^"\\]+')
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class InputGrammar(NamedTuple):
    """What the input of a custom tool must match, as the client wrote it."""

    syntax: str = ""  # one of `SYNTAXES`; empty: any text
    definition: str = ""


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a past call with this input."""
    return {INPUT: text}


class CustomInputs:
    """Replaces the arguments of calls of custom tools by the texts that they stand for."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._open: _Unwrapping | None = None
        self._index = 0

    def read(self, parts: list[Part], *, is_final: bool = False) -> list[Part]:
        """The parts, with inputs as far as they are certain; `is_final`: no more parts come."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, CallArguments) and self._open is not None:
                self._say(found, self._open.feed(part.text))
                continue
            self._close(found)
            if isinstance(part, CallStart) and part.name in self._names:
                self._open, self._index = _Unwrapping(), part.index
                part = CallStart(part.index, part.call_id, part.name, is_custom=True)
            found.append(part)
        if is_final:
            self._close(found)
        return found

    def _close(self, found: list[Part]) -> None:
        if self._open is not None:
            self._say(found, self._open.finish())
            self._open = None

    def _say(self, found: list[Part], text: str) -> None:
        if text:
            found.append(CallInput(self._index, text))


class _Unwrapping:
    """One call's arguments, from JSON to the text; how they are cut makes no difference."""

    def __init__(self) -> None:
        self._held = ""
        self._unlike: list[str] = []  # the arguments, once it is clear that they do not begin as expected
        self._in_string = self._is_over = False

    def feed(self, text: str) -> str:
        """Take the next piece; return the text that is certain now."""
        if self._unlike:
            self._unlike.append(text)
            return ""
        self._held += text
        if not self._in_string and not self._begins():
            return ""
        return self._unescaped()

    def finish(self) -> str:
        """End the arguments; return the rest of the text."""
        held, self._held = self._held, ""
        if not self._in_string:
            return _whole_input("".join(self._unlike) or held)
        return "" if self._is_over else _without_surrogates(held)  # half an escape, where the model was cut off

    def _begins(self) -> bool:
        head = _HEAD.match(self._held)
        if head is None or head.end() > _LONGEST_HEAD:
            if len(self._held) > _LONGEST_HEAD:
                self._unlike.append(self._held)  # all of it is read at the end
            return False
        self._held = self._held[head.end() :]
        self._in_string = True
        return True

    def _unescaped(self) -> str:
        """Decode the string as far as it has come; what follows it is dropped."""
        pieces: list[str] = []
        held, at = self._held, 0
        while at < len(held) and not self._is_over:
            if plain := _PLAIN.match(held, at):
                pieces.append(plain[0])
                at = plain.end()
            elif held[at] == '"':
                self._is_over = True
            else:
                character, length = _escaped(held[at : at + 12])
                if not length:
                    break
                pieces.append(character)
                at += length
        self._held = "" if self._is_over else held[at:]
        return _without_surrogates("".join(pieces))


def _escaped(text: str) -> tuple[str, int]:
    """The character that an escape stands for, and the escape's length; 0: more text is needed."""
    if len(text) < 2:
        return "", 0
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[1]), 2
    digits = re.match(r"[0-9a-fA-F]{0,4}", text[2:])
    assert digits is not None
    if len(digits[0]) < 4:
        return ("", 0) if len(text) == 2 + len(digits[0]) else (text[:2], 2)
    code = int(digits[0], 16)
    if not 0xD800 <= code < 0xDC00:
        return chr(code), 6
    second = re.match(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})", text[6:])
    if second is not None:
        return chr(0x10000 + ((code - 0xD800) << 10) + int(second[1], 16) - 0xDC00), 12
    may_follow = len(text) < 12 and re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?", text[6:]) is not None
    return ("", 0) if may_follow else (chr(code), 6)


def _whole_input(arguments: str) -> str:
    """The text of arguments that do not begin as expected: their only text, or they themselves."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return arguments
    if isinstance(value, dict):
        if isinstance(value.get(INPUT), str):
            return str(value[INPUT])
        texts = [each for each in value.values() if isinstance(each, str)]
        if len(value) == len(texts) == 1:
            return texts[0]
        return "" if not value else arguments
    return value if isinstance(value, str) else arguments


def _without_surrogates(text: str) -> str:
    """The text with halves of characters replaced: they cannot be sent."""
    return _SURROGATES.sub("\ufffd", text) if _SURROGATES.search(text) else text
