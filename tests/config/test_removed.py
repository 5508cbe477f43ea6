"""Options that are gone are named with what to do instead; fields that are no options can be set by programs alone."""

import argparse

import pytest

from penstock.cli.commands import COMMANDS
from penstock.config import Config, ConfigError
from penstock.config.engines import with_own_files
from penstock.config.flags import config_from, fields, flags
from penstock.config.foreign_flags import FOREIGN_FLAGS, unknown_variables
from penstock.config.parser import Parser
from penstock.config.removed import REMOVED, why_gone
from penstock.options import config_of
from penstock.parts.disk.options import DiskOptions
from penstock.parts.recording.options import RecordingOptions


@pytest.mark.parametrize("name", REMOVED)
def test_each_is_named_with_what_to_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a flag, as a switch, with underscores, as a variable; before and behind the model."""
    parser = Parser("penstock serve", "")
    parser.add_argument("model", nargs="?")
    parser.add_flags(COMMANDS["serve"].groups)
    for typed in ([name, "5", "m"], ["m", f"{name.replace('-', '_').replace('__', '--', 1)}=5"], [f"--no-{name[2:]}"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(typed)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"{name[2:]} is gone; {REMOVED[name]}" in said
        assert said.count("\n") == 1
    variable = f"PENSTOCK_{name[2:].upper().replace('-', '_')}"
    assert unknown_variables({variable: "5"}) == [f"the variable {variable} is gone; {REMOVED[name]}"]


def test_nothing_else_is_gone() -> None:
    known = {flag.name for flag in flags()} | {name for flag in flags() for name in flag.shown.also}
    assert not known & REMOVED.keys()
    assert not FOREIGN_FLAGS.keys() & REMOVED.keys(), "those would be explained as another engine's"
    assert not any(map(why_gone, (*known, "--heartbeat", "--max-num-seq", "m", "-n")))


def test_what_is_named_instead_is_there() -> None:
    known = {flag.name for flag in flags()}
    named = {word.rstrip(",;:") for instead in REMOVED.values() for word in instead.split() if word.startswith("--")}
    assert named <= known
    assert len(named) > 10


def test_python_says_the_same() -> None:
    with pytest.raises(ConfigError, match=r"^batch_size is gone; use max_num_seqs"):
        config_of({"batch_size": 3}, {})


def test_internal_fields_are_for_programs() -> None:
    internal = [field for field in fields() if field.is_internal]
    assert {field.name for field in internal} & {flag.name for flag in flags()} == set()
    assert config_from(argparse.Namespace(), {field.variable: "0" for field in internal}) == Config()
    given = config_of({"pipeline_depth": 2, "check_ranks": True, "max_n": 128, "strict_requests": True}, {})
    assert (given.scheduler.pipeline_depth, given.parallel.check_ranks) == (2, True)
    assert (given.frontend.max_n, given.frontend.strict_requests) == (128, True)
    with pytest.raises(ConfigError, match=r"^pipeline_depth 5: .*<= 4"):
        config_of({"pipeline_depth": 5}, {})


def test_signs_of_life_come_often_enough() -> None:
    """For any timeout: as a bound of their own they could be too rare."""
    for timeout, interval in ((10.0, 1.0), (60.0, 1.0), (2.0, 0.2), (0.5, 0.05)):
        config = config_from(argparse.Namespace(heartbeat_timeout=timeout), {})
        assert config.ipc.heartbeat_interval == pytest.approx(interval)


@pytest.mark.parametrize(
    ("given", "path", "mib"),
    [("run.jsonl", "run.jsonl", 256), ("/a/run.jsonl:512", "/a/run.jsonl", 512), ("a:b", "a:b", 256)],
)
def test_a_recording_may_have_a_size(given: str, path: str, mib: int) -> None:
    recording = config_from(argparse.Namespace(record=given), {}).of(RecordingOptions).file
    assert recording is not None
    assert (str(recording[0]), recording[1]) == (path, mib)


def test_each_engine_has_its_own_part() -> None:
    given = argparse.Namespace(record="/a/run.jsonl:512", disk_kv="/kv:1.5", data_parallel_size=2)
    own = with_own_files(config_from(given, {}), 1)
    assert (own.of(RecordingOptions).record, own.of(DiskOptions).disk_kv) == ("/a/run-1.jsonl:512", "/kv/engine-1:1.5")
    none = with_own_files(config_from(argparse.Namespace(data_parallel_size=2), {}), 1)
    assert (none.of(RecordingOptions).record, none.of(DiskOptions).disk_kv) == ("", "")
