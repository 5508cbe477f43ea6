"""Parts of a worker: who is there, what a failed start leaves, and what takes part in steps."""

from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.config import ConfigError
from penstock.gpu_worker.part import Context, WorkerPart
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.row_part import RowPart, Sent
from penstock.ipc.messages import RowError, SamplingParams, StepPlan, StepResult, WorkerHello
from tests.gpu_worker.checkpoints import make_checkpoint, prompts
from tests.gpu_worker.engine_in_process import Engine, make_config

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = prompts((9, 17))
FORCED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_checkpoint(made, "llama")
    return made


def only(monkeypatch: pytest.MonkeyPatch, *kinds: type[WorkerPart]) -> None:
    """The parts that a worker finds."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.brought", lambda file, base: kinds)


def test_a_worker_without_parts_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Engine(folder).run(PROMPTS, GREEDY)
    only(monkeypatch)
    engine = Engine(folder)
    assert engine.parts == []
    assert engine.run(PROMPTS, GREEDY) == expected


class Opened(WorkerPart):
    """Notes that it is closed, and may say something."""

    num_open = 0

    @classmethod
    def of(cls, context: Context) -> "Opened":
        Opened.num_open += 1
        return cls()

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, failed_tiers=("told",))

    def close(self) -> None:
        Opened.num_open -= 1


class Refusing(WorkerPart):
    """Cannot have what the configuration asks for."""

    @classmethod
    def of(cls, context: Context) -> None:
        raise ConfigError("no")


class Absent(WorkerPart):
    """Has no use for this worker."""

    @classmethod
    def of(cls, context: Context) -> None:
        return None


def test_a_part_adds_to_the_hello(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Opened, Absent)
    started = start(make_config(folder))
    assert started.hello.failed_tiers == ("told",)
    (part,) = started.parts
    part.close()
    assert Opened.num_open == 0


def test_a_failed_start_closes_what_it_has_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Opened, Refusing)
    with pytest.raises(ConfigError):
        start(make_config(folder))
    assert Opened.num_open == 0


class Forcing(RowPart):
    """Makes every token of the rows with short prompts the same, and says how often."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.num_masked = 0
        self.told: list[bytes] = []

    @classmethod
    def of(cls, context: Context) -> "Forcing":
        return cls()

    def enter(self, plan: StepPlan) -> None:
        self.rows -= set(memoryview(plan.freed_rows).cast("i").tolist()) if plan.freed_rows else set()
        self.rows |= {new.row for new in plan.new_rows if new.num_prompt_tokens < 10}

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
        self.num_masked += 1
        logits[:, FORCED] = 1e9
        return ()

    def sends(self) -> Sent:
        return Sent(partial(self._put, self.num_masked), torch.tensor([self.num_masked], dtype=torch.int32))

    def _put(self, expected: int, result: StepResult, values: bytes) -> StepResult:
        assert memoryview(values).cast("i").tolist() == [expected]
        self.told.append(values)
        return result

    def clear(self) -> None:
        self.rows.clear()


def test_a_part_takes_part_in_steps_while_it_has_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Engine(folder).run(PROMPTS, GREEDY)
    only(monkeypatch, Forcing)
    engine = Engine(folder)
    (part,) = engine.parts
    assert isinstance(part, Forcing)
    assert engine.run(PROMPTS[1:], GREEDY) == expected[1:]
    assert part.num_masked == 0, "it has no row"
    assert engine.run(PROMPTS[:1], GREEDY) == [[[FORCED] * 6]]
    assert part.num_masked == len(part.told) == 6
    assert engine.run(PROMPTS[1:], GREEDY) == expected[1:]
    assert part.num_masked == 6, "its row is gone"
