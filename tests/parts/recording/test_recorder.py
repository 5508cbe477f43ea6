"""What is recorded is what happened: random traces of a scheduler, and its process with real sockets."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.config import Config, ConfigError
from penstock.core.launch.output_files import check_output_files
from penstock.core.scheduling.scheduler import Refusal, ScheduledStep
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AbortRequest, AddRequest, PauseRequest, StepPlan
from penstock.parts.recording import writer as writer_module
from penstock.parts.recording.lines import Lost, Order, Worker
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.reader import Recording, parts
from penstock.parts.recording.scheduler.recorder import Recorder
from penstock.parts.recording.writer import RecordingWriter
from tests.core.driver import OWNER, Driver, hello, make_limits, make_request
from tests.core.scheduling.test_scheduler_traces import random_limits, random_requests


def config(path: Path, **options: object) -> Config:
    return Config().with_options(RecordingOptions(record=str(path), **options))  # type: ignore[arg-type]


class RecordedDriver(Driver):
    """A driver that tells a recorder what the engine loop would tell it."""

    def __init__(self, path: Path, limits: object = None, **options: object) -> None:
        super().__init__(limits)  # type: ignore[arg-type]
        self.recorder = Recorder(config(path, **options))
        self.recorder.on_workers(hello(self.limits))
        self.all_plans: list[StepPlan] = []

    def add(self, request: AddRequest, owner: bytes = OWNER) -> Refusal | None:
        refusal = super().add(request, owner)
        self.recorder.on_request(request, self.scheduler, refusal)
        return refusal

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        self.recorder.on_steer(AbortRequest(request_id, sequence_idx))
        super().abort(request_id, sequence_idx)

    def schedule(self) -> ScheduledStep | None:
        step = super().schedule()
        if step is not None:
            self.recorder.on_plan(step.plan, self.scheduler)
            self.all_plans.append(step.plan)
        return step

    def process(self) -> object:  # type: ignore[override]
        result = self.results.popleft()
        told = self.scheduler.process(result)
        self.recorder.on_result(result, told.values())
        from penstock.ipc.codec import deltas_of

        deltas = {owner: list(deltas_of(batch)) for owner, batch in told.items()}
        self.take(deltas)
        return deltas

    def die(self) -> None:
        self.reset_worker(has_died=False)
        self.recorder.on_workers(hello(self.limits))

    def read(self, path: Path) -> Recording:
        self.recorder.close()
        return Recording.read(path)


@pytest.mark.parametrize("seed", range(12))
def test_plans_and_outputs_are_those_of_the_run(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    limits = random_limits(rng)
    path = tmp_path / "rec"
    driver = RecordedDriver(path, limits, record_prompts=True)
    requests = random_requests(rng, limits)
    while requests or driver.scheduler.has_work:
        if requests and rng.random() < 0.3:
            request = requests.popleft()
            driver.add(request)
        if rng.random() < 0.02 and driver.added:
            driver.abort(rng.choice(list(driver.added)), rng.choice([-1, 0]))
        if rng.random() < 0.02:
            driver.die()
        driver.step()
    recording = driver.read(path)
    [run] = recording.runs
    assert not recording.num_damaged
    plain = [msgspec.structs.replace(plan, new_rows=()) for plan in driver.all_plans]
    assert [plan for _, plan in run.plans()] == plain
    assert any(plan.is_same for plan, _ in run.plans())
    for (recorded, _), plan in zip(run.plans(), driver.all_plans, strict=True):
        for new, row in zip(recorded.new, plan.new_rows, strict=True):
            prompt = run.requests[new.id].arrival.token_ids
            assert (new.row, new.pages) == (row.row, row.page_ids)
            assert row.token_ids[: len(prompt)] == prompt
            assert new.num_tokens == len(row.token_ids) // 4
    for (request_id, idx), delta in driver.finished.items():
        end = run.requests[request_id].ends[idx]
        assert list(unpack_int32(end.token_ids)) == driver.outputs.get((request_id, idx), [])
        assert (end.reason, end.stop_token_id) == (delta.finish_reason, delta.stop_token_id)
        assert end.num_cached_tokens == driver.num_cached.get((request_id, idx), 0)
        assert 0 < run.requests[request_id].arrival.at < end.first_token_at <= end.at
    for request_id, idx in driver.aborted:
        end = run.requests[request_id].ends[idx]
        assert end.reason == "abort"
        assert list(unpack_int32(end.token_ids))[: end.num_tokens] == driver.outputs.get((request_id, idx), [])
    for request_id, (request, _) in driver.added.items():
        recorded_request = run.requests[request_id]
        assert recorded_request.sampling() == request.sampling
        assert recorded_request.prompt() == unpack_int32(request.prompt_token_ids)
        assert set(recorded_request.ends) == set(range(request.n))


def test_nothing_that_was_said_is_in_it_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path, make_limits(page_size=4))
    prompt = [41, 42, 43, 44, 45]
    driver.add(make_request("a", prompt, 3, tenant="a person", salt="a salt", grammar="secret words"))
    driver.run()
    recording = driver.read(path)
    [request] = recording.requests()
    assert not request.has_tokens
    assert request.arrival.withheld == ("grammar",)
    assert not request.ends[0].token_ids
    assert request.ends[0].num_tokens == 3
    text = path.read_text()
    for said in ("a person", "a salt", "secret words"):
        assert said not in text
    assert '"token_ids"' not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Whoever has the file cannot try prompts: equal ones have other digests in another run.
    other = tmp_path / "other"
    again = RecordedDriver(other, make_limits(page_size=4))
    again.add(make_request("a", prompt, 3))
    [other_request] = again.read(other).requests()
    assert other_request.arrival.digest != request.arrival.digest
    assert other_request.page_digests() != request.page_digests()


def test_prompts_that_begin_alike_have_digests_that_do(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path, make_limits(page_size=4))
    stem = list(range(10))
    for name, prompt, salt in [
        ("a", stem, ""),
        ("b", [*stem[:8], 99, 98, 97, 96, 95], ""),
        ("c", [*stem[:7], 99, 98], ""),
        ("d", stem, "x"),
        ("e", stem, ""),
    ]:
        driver.add(make_request(name, prompt, salt=salt))
    pages = {request.arrival.id: request.page_digests() for request in driver.read(path).requests()}
    assert [len(each) for each in pages.values()] == [2, 3, 2, 2, 2]
    assert pages["a"] == pages["b"][:2] == pages["e"]
    assert pages["c"][0] == pages["a"][0]
    assert pages["c"][1] != pages["a"][1]
    assert not set(pages["d"]) & set(pages["a"])


def test_the_newest_lines_are_kept_in_files_that_each_begin_with_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "FLUSH_SECONDS", 0.001)
    path = tmp_path / "rec"
    driver = RecordedDriver(path, make_limits(num_pages=400), record_prompts=True)
    driver.recorder._max_part_bytes = part = 20_000
    for number in range(60):
        driver.add(make_request(f"r{number}", range(40), 40))
        driver.run()
    recording = driver.read(path)
    files = parts(path)
    assert [file.name for file in files] == ["rec.3", "rec.2", "rec.1", "rec"]
    assert all(part <= file.stat().st_size < 1.1 * part for file in files[:-1])
    for file in files:
        lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
        assert [line["kind"] for line in lines[:2]] == ["header", "worker"]
        assert not lines[2].get("is_same")
    [run] = recording.runs
    assert not run.is_whole
    assert not recording.num_damaged
    assert "r59" in run.requests
    assert "r0" not in run.requests
    num_plans = len(list(run.plans()))
    steps = [plan.step for plan, _ in run.plans()]
    assert steps == list(range(steps[-1] - num_plans + 1, steps[-1] + 1))
    assert [plan for _, plan in run.plans()] == [
        msgspec.structs.replace(plan, new_rows=()) for plan in driver.all_plans[-num_plans:]
    ]


def test_another_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    first = RecordedDriver(path)
    first.add(make_request("a", [1, 2]))
    first.read(path)
    path.write_bytes(path.read_bytes()[:-5])  # it was killed in the middle of a line
    second = RecordedDriver(path)
    second.add(make_request("b", [1, 2]))
    recording = second.read(path)
    assert [list(run.requests) for run in recording.runs] == [[], ["b"]]
    assert recording.num_damaged == 1


def wait_for(check: Callable[[], bool]) -> None:
    for _ in range(500):
        if check():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not happen")


def test_a_full_disk_costs_lines_and_one_line_of_log(tmp_path: Path) -> None:
    with capture_logs() as logs:
        driver = RecordedDriver(Path("/dev/full"))
        driver.add(make_request("a", [1, 2, 3]))
        driver.run()
        wait_for(lambda: driver.recorder.num_lost > 5)
        driver.add(make_request("b", [1, 2, 3]))
        driver.run()
        driver.recorder.close()
    [line] = logs
    assert line["event"] == "recording lines lost"
    assert line["reason"] == "No space left on device"


def test_a_pipe_that_nobody_reads_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before it is opened, nor when it is full, nor when its reader has gone; what is lost is said."""
    monkeypatch.setattr(writer_module, "MAX_PENDING_BYTES", 100_000)
    monkeypatch.setattr(writer_module, "CLOSE_SECONDS", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    driver = RecordedDriver(path)

    def compute(name: str) -> None:
        for number in range(40):
            driver.add(make_request(f"{name}{number}", range(20), 30))
            driver.run()

    with capture_logs() as logs:
        compute("a")
        num_lost = driver.recorder.num_lost
        assert num_lost > 0
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        compute("b")  # the pipe is full
        assert driver.recorder.num_lost > num_lost
        os.close(reader)
        compute("c")
        driver.recorder.close()
    assert len(logs) == 1


def test_lost_lines_are_said_and_the_next_plan_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path)
    driver.add(make_request("a", range(10), 60))
    for _ in range(10):
        driver.step()
    monkeypatch.setattr(writer_module, "MAX_PENDING_BYTES", 0)
    for _ in range(10):
        driver.step()
    monkeypatch.undo()
    driver.run()
    [run] = driver.read(path).runs
    [lost] = [event for event in run.events if isinstance(event, Lost)]
    assert lost.num_lines == run.num_lost >= 20
    told = {plan.step: full for plan, full in run.plans()}
    assert 40 < len(told) < len(driver.all_plans)
    for plan in driver.all_plans:
        assert told.get(plan.step_id, plan).start == plan.start


def test_a_writer_gives_up_on_what_takes_too_long_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_SECONDS", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = RecordingWriter(path)
    writer.offer(b"a line\n")
    writer.close()  # nobody opens the other end
    assert writer._thread.is_alive()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer._thread.join(5)
    os.close(reader)


def test_a_file_that_is_no_recording_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no recording"):
        check_output_files(config(path))
    with capture_logs() as logs:
        RecordedDriver(path).recorder.close()
    assert logs[0]["reason"] == "it is no recording"
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot write the recording"):
        check_output_files(config(tmp_path / "absent" / "rec"))
    there = tmp_path / "rec"
    driver = RecordedDriver(there)
    driver.read(there)
    before = there.read_bytes()
    check_output_files(config(there))
    assert there.read_bytes() == before


def test_orders_and_workers_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path)
    driver.add(make_request("a", [1, 2]))
    driver.recorder.on_steer(PauseRequest("a"))
    driver.recorder.on_reset()
    driver.die()
    driver.recorder.on_owner_gone(b"somebody else")
    driver.recorder.on_owner_gone(OWNER)
    [run] = driver.read(path).runs
    orders = [event for event in run.events if isinstance(event, Order)]
    assert [(order.order, order.id) for order in orders] == [("pause", "a"), ("reset_prefix_cache", "")]
    assert len([event for event in run.events if isinstance(event, Worker)]) == 2
    assert run.requests["a"].ends[0].reason == "abort"
