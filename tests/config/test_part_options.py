"""Options of parts: they are like all others, and no file outside of the part names them."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.config import Config, ConfigError, parts
from penstock.config.engines import of_engine
from penstock.config.flags import config_from, flags, flags_of
from penstock.config.foreign_flags import unknown_variables
from penstock.config.parser import Parser
from penstock.parts.disk.options import DiskOptions
from tests.parts.distribution import install
from tests.parts.toy.options import ToyOptions


@pytest.fixture(autouse=True)
def _has_the_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    for cached in (parts.packages, parts._listed):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (parts.packages, parts._listed):
        cached.cache_clear()


def parser(*groups: str) -> Parser:
    made = Parser("penstock serve", "About it.")
    made.add_flags(groups)
    return made


def parse(*arguments: str, **environment: str) -> Config:
    return config_from(parser("frontend").parse_args(arguments), environment)


def test_they_are_flags_and_variables_with_bounds() -> None:
    config = parse("--toy-word", "hi", "--toy-names", "a,b", PENSTOCK_TOY_TIMES="3", PENSTOCK_TOY_WORD="no")
    assert config.of(ToyOptions) == ToyOptions(toy_word="hi", toy_times=3, toy_names=("a", "b"))
    assert config.of(ToyOptions) is config.of(ToyOptions)
    assert parse("--game-word", "x").of(ToyOptions).toy_word == "x"
    assert parse() == Config()
    with pytest.raises(ConfigError, match="PENSTOCK_TOY_TIMES '10'"):
        parse(PENSTOCK_TOY_TIMES="10")
    assert unknown_variables({"PENSTOCK_TOY_WORD": "x"}) == []


def test_what_one_bound_cannot_say_the_part_says() -> None:
    with pytest.raises(ConfigError, match="--toy-word 'a1' has other"):
        parse("--toy-word", "a1")


def test_a_command_takes_them_beside_the_group_that_they_name() -> None:
    assert "toy_word" in {flag.field for flag in flags()}
    assert "toy_word" in {flag.field for flag in flags(("model", "frontend"))}
    assert "toy_word" not in {flag.field for flag in flags(("model", "scheduler"))}
    assert "toy_word" not in {flag.field for flag in flags_of("frontend")}
    assert "\n  --toy-word WORD" in parser("frontend").format_help()
    assert "--toy-word" not in parser("scheduler").format_help()


def test_they_go_to_children_and_come_back() -> None:
    config = parse("--toy-names", "a", "--port", "1")
    back = msgspec.json.decode(msgspec.json.encode(config), type=Config)
    assert back == config
    assert back.of(ToyOptions).toy_names == ("a",)


def test_other_values_make_another_config() -> None:
    before = parse("--toy-times", "2")
    after = before.with_options(ToyOptions(toy_word="x"))
    assert (before.of(ToyOptions).toy_times, before.of(ToyOptions).toy_word) == (2, "hello")
    assert (after.of(ToyOptions).toy_times, after.of(ToyOptions).toy_word) == (1, "x")
    assert after.with_options(ToyOptions()) == Config()
    assert hash(after) == hash(before.with_options(ToyOptions(toy_word="x"))) != hash(before)


def test_each_engine_has_files_of_its_own() -> None:
    several = msgspec.structs.replace(Config().parallel, data_parallel_size=2)
    two = "ipc://a,ipc://b"
    ipc = msgspec.structs.replace(Config().ipc, frontend_address=two, worker_address=two, rendezvous_address=two)
    config = Config(parallel=several, ipc=ipc).with_options(ToyOptions(toy_file="x/f.txt", toy_times=2))
    assert of_engine(config, 1).of(ToyOptions) == ToyOptions(toy_file="x/f-1.txt", toy_times=2)


def test_without_the_part_its_options_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "entry_points", lambda group: [])
    for cached in (parts.packages, parts._listed):
        cached.cache_clear()
    assert "toy_word" not in {flag.field for flag in flags()}
    with pytest.raises(SystemExit):
        parse("--toy-word", "hi")
    assert config_from(argparse.Namespace(toy_word="hi"), {}) == Config()


def test_a_disk_tier_is_refused_without_the_host_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages have no other way: the option would be ignored."""
    given = argparse.Namespace(disk_kv="/kv:1")
    assert config_from(given, {}).of(DiskOptions).disk_kv == "/kv:1"
    others = tuple(package for package in parts.packages() if not package.endswith(".host"))
    monkeypatch.setattr(parts, "packages", lambda: others)
    parts._listed.cache_clear()
    with pytest.raises(ConfigError, match="--disk-kv: the part 'host' is missing"):
        config_from(given, {})
