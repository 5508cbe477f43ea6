"""`penstock run-batch` says what is wrong before it starts an engine."""

import json
from pathlib import Path

import pytest

from penstock.run_batch import main

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({}, "line 1: custom_id is missing"),
        (GOOD | {"url": "/v1/moderations"}, "line 1: url must be '/v1/chat/completions' or"),
        (GOOD | {"body": {"model": "other"}}, "line 1: the model 'other' is not served here"),
    ],
)
def test_a_file_with_errors_is_refused(
    tmp_path: Path, line: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(json.dumps(line) + "\n")
    assert main(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ['{"id": 1}\n', "a note without an end", '{"id":"batch_req_1_1"'])
def test_another_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "in").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "out").write_text(text)
    assert main(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2
    assert "name another file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == text


@pytest.mark.parametrize("arguments", [["--max-num-seqs", "-1"], ["--ctx-size", "5"], ["--port", "5"]])
def test_options_that_cannot_be_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    try:
        code = main([*files, *arguments])
    except SystemExit as error:  # argparse's
        code = int(str(error.code))
    assert code == 2
