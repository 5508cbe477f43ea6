"""Reads an output in pieces, and checks that it says what the whole says."""

import itertools
import random

from penstock.frontend.parsing.parser import MessageParser, OutputFormat
from penstock.frontend.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning


def collected(parts: list[Part]) -> tuple[str, str, list[list[str]]]:
    reasoning = content = ""
    calls: list[list[str]] = []
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(index, call_id, name):
                assert index == len(calls)
                assert call_id
                calls.append([name, ""])
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index][1] += text
    return reasoning, content, calls


def in_pieces(form: OutputFormat, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    parser = MessageParser(form)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return collected(parts + parser.finish())


def assert_same_at_every_cut(form: OutputFormat, text: str) -> tuple[str, str, list[list[str]]]:
    whole = in_pieces(form, [text])
    assert in_pieces(form, list(text)) == whole
    for cut in range(1, len(text)) if len(text) < 200 else ():
        assert in_pieces(form, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    rng = random.Random(text)
    for _ in range(8):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        assert in_pieces(form, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
    return whole
