"""What is said and checked before anything is loaded: sizes, output files, sentences for people."""

import errno
import json
import shlex
from pathlib import Path

import msgspec
import pytest

from penstock.config import Config, ConfigError, WorkerOptions
from penstock.core.launch.banner import curl_line, pool_text
from penstock.core.launch.output_files import check_output_files
from penstock.ipc.addresses import AddressError, private_dir
from penstock.ipc.messages import StepResult
from penstock.models.families.registry import parse_model_config
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.scheduler.step_trace import StepTrace


def tracing(path: Path | str) -> Config:
    return Config().with_options(RecordingOptions(step_trace=str(path)))


def test_a_step_trace_that_can_be_written_is_left_empty(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    check_output_files(tracing(path))
    assert path.read_bytes() == b""
    check_output_files(Config())


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/full", "No space left"), ("/nowhere/steps.jsonl", "No such file"), ("/", "directory")]
)
def test_a_step_trace_that_cannot_be_written_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_output_files(tracing(path))


def test_a_profile_goes_into_a_folder_that_can_be_made(tmp_path: Path) -> None:
    check_output_files(Config(worker=WorkerOptions(profile=str(tmp_path / "new" / "folder"))))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"profile.*Not a directory"):
        check_output_files(Config(worker=WorkerOptions(profile=str(tmp_path / "file" / "folder"))))


def test_a_disk_that_fills_up_ends_the_trace_alone() -> None:
    trace = StepTrace("/dev/full")
    for step_id in range(2):
        trace.planned(step_id, msgspec.to_builtins({"rows": "x" * 100_000}), 1.0, 2.0)
        trace.returned(StepResult(step_id, b"", 1, 0), 3.0, 1.0, None)
        trace.flush()
    trace.close()


def test_a_folder_for_sockets_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AddressError, match="Not a directory"), private_dir(str(tmp_path / "file" / "run")):
        pass

    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(AddressError, match="No space left"), private_dir():
        pass


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (512, "less than one chat"),
        (10 * 1024, "10 chats of 1k tokens at once; at most 2,048 each"),
        (100 * 1024, "64 chats of 1k tokens at once, and 36 more cached"),
    ],
)
def test_the_pool_is_told_in_chats(num_tokens: int, words: str) -> None:
    assert words in pool_text(num_tokens, 64, 2048)


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:1", "it's a model"))
    assert words[2] == "http://127.0.0.1:1/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "it's a model"


@pytest.mark.parametrize(
    ("architecture", "path"), [("BertModel", "/v1/embeddings"), ("BertForSequenceClassification", "/v1/classify")]
)
def test_the_curl_line_of_a_model_without_chats(architecture: str, path: str) -> None:
    model = parse_model_config({"architectures": [architecture], "vocab_size": 9, "num_hidden_layers": 1})
    words = shlex.split(curl_line("http://127.0.0.1:1", "m", model))
    assert words[2] == f"http://127.0.0.1:1{path}"
    assert json.loads(words[-1]).keys() == {"model", "input"}
