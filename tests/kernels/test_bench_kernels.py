"""The kernel benchmark's own code, in its dry form."""

import json
from pathlib import Path

import pytest

from penstock.bench import kernels


def test_dry_run_covers_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    assert kernels.main(["--dry", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["dry"] is True
    assert {result["part"] for result in record["results"]} == set(kernels.PARTS)
    assert all(result["seconds"] > 0 and result["rate"] > 0 for result in record["results"])
    assert "dry run" in capsys.readouterr().out


def test_parts_can_be_picked(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--dry", "--only", "decode"]) == 0
    assert "sampling" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kernels.main(["--dry", "--only", "decoding"])
