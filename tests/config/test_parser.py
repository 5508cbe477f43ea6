"""Command lines: what is typed wrongly is told, other engines' names work, and help fits the screen."""

import argparse
import re

import pytest

from penstock.cli.commands import COMMANDS
from penstock.config import Config
from penstock.config.flags import config_from, flags
from penstock.config.foreign_flags import FOREIGN_FLAGS
from penstock.config.parser import Parser

SCREENS = 2 * 45
WIDTH = 100
SERVERS = [name for name, command in COMMANDS.items() if command.groups]


def serve(name: str = "serve") -> Parser:
    parser = Parser(f"penstock {name}", "About it.")
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="a model")
    parser.add_flags(COMMANDS[name].groups)
    return parser


@pytest.mark.parametrize("name", SERVERS)
def test_help_fits_two_screens_with_a_line_for_each_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines = serve(name).format_help().splitlines()
    assert len(lines) <= SCREENS
    assert max(map(len, lines)) <= WIDTH
    common = [flag for flag in flags(COMMANDS[name].groups) if flag.shown.line]
    for flag in common:
        [line] = [line for line in lines if re.match(rf"  (-\w+, )?--(no-)?{flag.name[2:]}( |$)", line)]
        assert flag.shown.line in line
    of_groups = lines[lines.index("Scheduler:" if "Scheduler:" in lines else "Frontend:") :]
    assert all(re.match(r"  -|\w.*:$|$|Each option is|`--help-all`", line) for line in of_groups)  # none goes on
    told = [line for line in lines if re.match(r"  (-\w+, )?--", line)]
    assert len(told) == len(common) + 2  # and --help, --help-all


def test_all_options_are_in_the_long_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit) as ended:
        serve().parse_args(["--help-all"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for flag in flags():
        assert re.search(rf"^  --(\[no-\])?{flag.name[2:]}( |$)", said, re.MULTILINE), flag.name
        assert flag.variable in said
    assert max(map(len, said.splitlines())) <= WIDTH
    assert said.count("usage:") == 1
    assert said.splitlines()[0] == "usage: penstock serve [MODEL] [OPTIONS]"


def test_every_text_says_what_it_is() -> None:
    wrong = [flag.name for flag in flags() if flag.type is str and flag.value in ("N", "NUMBER")]
    assert not wrong
    shown = {flag.name: flag.value for flag in flags()}
    assert shown["--cors-origins"] == "ORIGIN[,...]"
    assert shown["--queue-timeout"] == "SECONDS"
    assert shown["--host-kv-gib"] == "GIB"
    assert shown["--web-ui"] == "auto|on|off"
    assert shown["--enforce-eager"] == ""


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--enable-prefix-cachin", "--enable-prefix-caching"),  # the beginning of an option is not that option
        ("--max-num-seq=3", "--max-num-seqs"),
        ("--tensor_parallel_siz", "--tensor-parallel-size"),
        ("--help-al", "--help-all"),
    ],
)
def test_the_beginning_of_an_option_is_a_typing_error(
    typed: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve().parse_args([typed])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"penstock serve: there is no option {typed}; did you mean {near}?\n"


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    parser = serve()
    parser.add_argument("--must", required=True)
    for typed in (["--port", "x"], ["--web-ui", "blue"], [], ["a", "b"]):
        with pytest.raises(SystemExit):
            parser.parse_args(typed)
        said = capsys.readouterr().err
        assert said.startswith("penstock serve: ")
        assert said.count("\n") == 1


def parsed(*words: str) -> Config:
    return config_from(serve().parse_args(words), {})


def test_other_engines_names_of_the_same_option_work() -> None:
    typed = "-m some/model -tp 2 --pp-size=3 -dp 4 -c 4096 -np 8 -t 2 -a n"
    config = parsed(*typed.split())
    assert config.model.model == "some/model"
    assert config.model.max_model_len == 4096
    assert config.model.served_model_name == ("n",)
    assert (config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size) == (2, 3)
    assert config.parallel.data_parallel_size == 4
    assert (config.scheduler.max_num_seqs, config.worker.num_threads) == (8, 2)
    assert parsed("--max_num_seqs", "5").scheduler.max_num_seqs == 5
    assert parsed("--model=a_b").model.model == "a_b"


def test_a_name_means_one_thing() -> None:
    others = [name for flag in flags() for name in flag.shown.also]
    assert len(set(others)) == len(others)
    assert not set(others) & {flag.name for flag in flags()}
    assert not set(others) & FOREIGN_FLAGS.keys()


def test_what_was_given_can_be_typed_again() -> None:
    typed = ["m", "-tp", "2", "--cors-origins", "http://a,http://b", "--cors-origins=http://c", "--no-spare-worker"]
    parser = serve()
    namespace = parser.parse_args(typed)
    words = parser.given(namespace)
    assert "--no-spare-worker" in words
    assert config_from(parser.parse_args(words), {}) == config_from(namespace, {})
