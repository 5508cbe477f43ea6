"""Loads: drawn as asked, the same for the same seed, and read from files."""

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.lab.simulation.arrivals import Arrival, Bursts, Shape, described, draw, read, write
from penstock.lab.simulation.prompts import Prompts


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(burstiness: float) -> None:
    times = list(Bursts(rate=20.0, burstiness=burstiness).times(40_000, random.Random(1)))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_on_and_off_phases_keep_the_rate_and_the_silence() -> None:
    times = list(Bursts(rate=10.0, on_off=(2.0, 3.0)).times(20_000, random.Random(1)))
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.03)
    assert all(time % 5.0 <= 2.0 + 1e-6 for time in times)
    assert times == sorted(times)


def test_all_at_once() -> None:
    assert list(Bursts(rate=math.inf).times(3, random.Random(1))) == [0.0, 0.0, 0.0]


def test_a_load_is_drawn_as_asked() -> None:
    shape = Shape(input_len=(50, 90), output_len=(3, 5), prefix_len=60, num_prefixes=3, num_keys=4)
    load = draw(500, Bursts(rate=5.0), shape, seed=3)
    assert load == draw(500, Bursts(rate=5.0), shape, seed=3) != draw(500, Bursts(rate=5.0), shape, seed=4)
    assert {each.output_len for each in load} == {3, 4, 5}
    assert {each.input_len for each in load} == set(range(60, 91))  # at least the prefix
    assert len({each.prefix_id for each in load}) == 3
    assert len({each.key for each in load}) == 4
    about = described(load)
    assert about["num_requests"] == 500
    assert about["variation_of_gaps"] == pytest.approx(1.0, abs=0.15)


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    load = [
        Arrival(time=0.5, input_len=3, output_len=2, prefix_id="a", prefix_len=2, key="k", priority=-1, ttft_ms=5.0),
        Arrival(time=0.1, input_len=30, output_len=1, pages=bytes(range(8)), max_tokens=7),
    ]
    write(path, load)
    assert read(path) == load[::-1]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no requests"),
        ('{"time": 0, "input_len": 0, "output_len": 1}', "line 1.*input_len"),
        ('{"time": 0, "input_len": 5, "output_len": 1}\n{"time": -1, "input_len": 5, "output_len": 1}', "line 2.*time"),
        ('{"time": 0, "input_len": 5, "output_len": 1, "lenght": 4}', "lenght"),
        ("time,input_len", "line 1"),
        ('{"time": NaN, "input_len": 5, "output_len": 1}', "line 1"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read(path)
    with pytest.raises(ConfigError, match="/none"):
        read(tmp_path / "none.jsonl")


def test_prompts_share_what_they_should() -> None:
    prompts = Prompts(1000, 16, 300, seed=1)
    a = Arrival(time=0, input_len=200, output_len=1, prefix_id="a", prefix_len=100)
    first, second = prompts.make(a), prompts.make(a)
    other = prompts.make(Arrival(time=0, input_len=300, output_len=1, prefix_id="b", prefix_len=100))
    alone = prompts.make(Arrival(time=0, input_len=300, output_len=1))
    assert [len(each) for each in (first, second, other, alone)] == [800, 800, 1200, 1200]
    assert first[:400] == second[:400]
    assert first[400:464] != second[400:464]
    assert len({each[:64] for each in (first, other, alone)}) == 3
    assert Prompts(1000, 16, 300, seed=1).make(a) == first
