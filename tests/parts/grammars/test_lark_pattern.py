"""Lark grammars as regular expressions, held inside a JSON string by the library that enforces them."""

import json
from pathlib import Path

import pytest

from penstock.frontend.patterns import anchored, unanchored
from penstock.frontend.validation.custom_tools import enforced_parameters
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.frontend.lark_pattern import NoPatternError, pattern_of

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar that a well-known coding agent sends with its tool for edits."""

CASES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        [
            '*** Begin Patch\n*** Update File: a.py\n@@ def f\n-"x"\\n\n+\ty = 1  # ø\n*** End Patch\n',
            "*** Begin Patch\n*** Add File: b\n+\n+x\n*** Delete File: c\n*** End Patch",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Update File: a\n?x\n*** End Patch"],
    ),
    ('start: "a".."f" ~ 2..3', ["ab", "fed"], ["a", "abcd", "xy"]),
    (
        'start: "select"i WS name ["," name]\nname: CNAME\n%import common (WS, CNAME)',
        ["SELECT a,b", "select  x"],
        ["from a"],
    ),
    ('?start: (A | "b")* // a comment\nA.2: /a\\/+/s\n', ["", "ba//b"], ["c"]),
    ('start: "\\"" /[^"]/ "\\x41\\n"', ['"øA\n', '"\\A\n'], ['""A\n']),
    (r"start: /[^\\\n]+[^a\]]/", ["ab\t]x"], ["a\\b", "a]"]),
    ('start: a?b\n!a: "x" ~ 2\nb: "y" -> last', ["xxy", "y"], ["xy"]),
]


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> object:
    return grammar_vocabulary(open_checkpoint(checkpoint))


def takes(vocabulary: object, pattern: str, text: str) -> bool:
    schema = json.dumps(enforced_parameters(pattern))
    matcher = make_matcher(vocabulary, read_grammar(vocabulary, "json", schema).text)  # type: ignore[arg-type]
    tokens = vocabulary.tokenize_str(json.dumps({"input": text}, ensure_ascii=False))  # type: ignore[attr-defined]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("lark", "good", "bad"), CASES, ids=lambda value: str(value)[:20])
def test_a_grammar_holds_inside_json(vocabulary: object, lark: str, good: list[str], bad: list[str]) -> None:
    pattern = anchored(pattern_of(lark))
    for text in good:
        assert takes(vocabulary, pattern, text), text
    for text in bad:
        assert not takes(vocabulary, pattern, text), text


@pytest.mark.parametrize("pattern", ["[0-9]{2}|x", "^(?:[0-9]{2}|x)$", "^[0-9]{2}$|x"])
def test_a_regular_expression_is_for_the_whole_text(vocabulary: object, pattern: str) -> None:
    assert anchored(r"a\$") == r"^(?:a\$)$"
    assert anchored(r"a\\$") == r"^(?:a\\)$"
    if "$|" not in pattern:
        assert [takes(vocabulary, anchored(pattern), text) for text in ("12", "x", "123", "ax")] == [
            True,
            True,
            False,
            False,
        ]


@pytest.mark.parametrize(
    ("lark", "why"),
    [
        ('start: "(" start? ")"', "'start' refers to itself"),
        ("start: x", "there is no rule 'x'"),
        ('begin: "x"', "there is no rule 'start'"),
        ('start: ("a"', "a '(' is not closed"),
        ('start: "a" )', "')' is not understood"),
        ('start: "a"\nstart: "b"', "'start' is defined twice"),
        ('%ignore " "\nstart: "a"', "'%ignore' is not understood"),
        ('start: "a"\n%ignore " "', "'%ignore' is not understood"),
        ("%import python.NAME\nstart: NAME", "only terminals of 'common'"),
        ("%import common.EMOJI\nstart: EMOJI", "common.EMOJI is not known"),
        ("start: <think>", "'<think>' is not understood"),
        ('start: "a".."bc"', "not understood"),
        ("start: /a b/x", "not understood"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"', "too large"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested too deeply"),
        ("x", "'x' is not understood"),
        ('"' * 999, "not understood"),
    ],
)
def test_what_cannot_be_one_expression(lark: str, why: str) -> None:
    with pytest.raises(NoPatternError, match=r"(?s).*" + why.replace("(", r"\(").replace(")", r"\)")):
        pattern_of(lark)


@pytest.mark.parametrize(
    ("pattern", "inner"),
    [
        (anchored("a|b"), "a|b"),
        (anchored(r"(a)[)(](?:\()"), r"(a)[)(](?:\()"),
        ("^(?:a)|(?:b)$", ""),
        ("^a$", ""),
        ("(?:a)$", ""),
        (r"^(?:a\)$", ""),
        ("^(?:)a)$", ""),
        ("^(?:[^])(]x)$", "[^])(]x"),
        ("^(?:" + "[" * 99_999, ""),
        ("^(?:" + "[" * 99_999 + ")$", ""),
    ],
)
def test_what_is_anchored_is_found_again(pattern: str, inner: str) -> None:
    assert unanchored(pattern) == inner
