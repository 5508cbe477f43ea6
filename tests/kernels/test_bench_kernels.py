"""The kernel benchmark's own code, in its dry form."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.kernels import __main__ as kernels


def test_dry_run_covers_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    assert kernels.main(["--dry", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["dry"] is True
    assert {result["part"] for result in record["results"]} == set(kernels.PARTS)
    assert all(result["seconds"] > 0 and result["rate"] > 0 for result in record["results"])
    assert "dry run" in capsys.readouterr().out


def test_a_peer_that_fails_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it fails to be set up or in its first call."""

    def fail() -> None:
        raise RuntimeError("no such kernel")

    def make_nothing() -> list[Callable[[], object]]:
        raise ValueError("no such shape")

    monkeypatch.setattr(kernels, "decode_peers", lambda _: [("one", lambda: [fail]), ("other", make_nothing)])
    out = tmp_path / "kernels.json"
    assert kernels.main(["--dry", "--only", "decode,prefill", "--out", str(out)]) == 0
    decode, prefill = json.loads(out.read_text())["results"]
    assert decode["peers"] == {}
    assert decode["failed_peers"] == {"one": "RuntimeError: no such kernel", "other": "ValueError: no such shape"}
    assert (prefill["case"], prefill["failed_peers"]) == ("B=2 new=5 context=9", {})
    assert "other failed: ValueError" in capsys.readouterr().out


def test_what_is_measured_is_kept_when_a_later_case_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_and_no_more(*_: object) -> Iterator[kernels.Result]:
        yield kernels.Result("decode", "first", 1.0, 1.0, "GB/s", 1.0, {})
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(kernels, "bench_decode", one_and_no_more)
    out = tmp_path / "kernels.json"
    with pytest.raises(RuntimeError, match="gone"):
        kernels.main(["--dry", "--only", "decode", "--out", str(out)])
    assert [result["case"] for result in json.loads(out.read_text())["results"]] == ["first"]


def test_parts_can_be_picked(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--dry", "--only", "decode"]) == 0
    assert "sampling" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kernels.main(["--dry", "--only", "decoding"])
