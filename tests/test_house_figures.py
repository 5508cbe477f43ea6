"""The figures about the house can be had; none of them is a rule."""

import re

import pytest

from tests import house_figures


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["house_figures", "--request"])
    house_figures.main()
    said = capsys.readouterr().out
    entered = re.search(r"a plain chat request enters: (\d+) files, (\d+) lines", said)
    assert entered is not None, said
    assert 20 < int(entered[1]) < 200
