"""The clockwork model says what its oracle says, in every schedule; and notices a page that is not its own."""

from pathlib import Path

import pytest
import torch

from penstock.ipc.messages import SamplingParams
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.gpu_worker.engine_in_process import Engine, schedule

SCHEDULES = [
    schedule(512, 16, 0, num_tokens=6400),
    schedule(7, 4, 1, num_tokens=200, cached=True),
    schedule(33, 1, 2, num_tokens=400, cached=True),
]
PROMPTS = [[5, 6, 7], list(range(3, 90)), list(range(3, 60)), [9] * 17]


@pytest.mark.parametrize("options", SCHEDULES, ids=["plain", "tight", "deep"])
def test_every_schedule_gives_what_the_oracle_says(tmp_path: Path, options: dict[str, object]) -> None:
    engine = Engine(make_clockwork(tmp_path / "m"), **options)
    for _ in range(2):  # the second time from the prefix cache
        outputs = engine.run(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0), n=2)
        assert outputs == [[expected_tokens(prompt, 40)] * 2 for prompt in PROMPTS]


def test_a_foreign_token_shows(tmp_path: Path) -> None:
    engine = Engine(make_clockwork(tmp_path / "m"))
    prompt, greedy = [5, 6, 7] * 20, SamplingParams(max_tokens=30, temperature=0.0)
    assert engine.run([prompt], greedy) == [[expected_tokens(prompt, 30)]]
    cached = engine.runner._kv.layers[0].keys[:, 0, :, 0]
    with torch.inference_mode():
        cached[0, 3] += 1
    assert engine.run([prompt], greedy) != [[expected_tokens(prompt, 30)]]
