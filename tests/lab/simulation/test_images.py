"""Images in virtual time: encoded once, beside steps, in the time that was measured."""

from pathlib import Path

import msgspec
import pytest

from penstock.config import Config, ConfigError
from penstock.lab.simulation import tower as tower_model
from penstock.lab.simulation.arrivals import Arrival, ShownImage, read, write
from penstock.lab.simulation.fit import EncodeCosts, fit_encoding
from penstock.lab.simulation.study import Machine, Tower, measured
from penstock.parts.images.worker import turns
from penstock.parts.recording.lines import AnyLine, Encoded, End, Header, RecordedImage, Result, Worker, encoded, told
from penstock.parts.recording.lines import Arrival as RecordedArrival
from tests.lab.simulation.loads import KnownDevice, machine, simulator
from tests.lab.simulation.test_recordings import plan

FLAT = KnownDevice(step=10e-3, row=0, context=0, token=0, between=0)
COSTS = EncodeCosts(one=2e-3, embedding=1e-3, pair=0.0)


def seeing(costs: EncodeCosts = COSTS, *, max_embeddings: int = 1000) -> Machine:
    return machine(FLAT)._replace(tower=Tower(costs, 8, 8 * max_embeddings, images_are_whole=False))


def shows(at: float, *names: str, output_len: int = 2, size: int = 48) -> Arrival:
    images = tuple(ShownImage(name, 4 + i * size, size, size) for i, name in enumerate(names))
    return Arrival(time=at, input_len=16 + size * len(names), output_len=output_len, images=images)


def test_turns_are_the_workers() -> None:
    own = (tower_model.SHORTEST_SECONDS, tower_model.PART_OF_STEP, tower_model.NUM_RECENT, tower_model.STEPS_SHARE)
    assert own == (turns._SHORTEST_SECONDS, turns._PART_OF_STEP, turns._NUM_RECENT, turns._STEPS_SHARE)


def test_a_request_waits_for_its_image_and_nobody_encodes_it_again() -> None:
    run = simulator([shows(0.0, "cat"), shows(1.0, "cat"), shows(2.0, "cat", "dog")], seeing(), pipeline_depth=0).run()
    first, again, other = run.outcomes
    assert first.ttft == pytest.approx(50e-3 + 10e-3)
    assert again.ttft == pytest.approx(10e-3)
    pause = tower_model.STEPS_SHARE * tower_model.PART_OF_STEP * 10e-3
    assert other.ttft == pytest.approx(50e-3 + 10e-3 + pause), "the dog's, with a pause as there have been steps"
    assert run.busy == pytest.approx(2 * 50e-3 + 6 * 10e-3)


def test_equal_placeholders_of_other_images_share_nothing() -> None:
    shared = [
        msgspec.structs.replace(shows(float(i), name), prefix_id="turns")
        for i, name in enumerate(("cat", "dog", "cat"))
    ]
    run = simulator(shared, seeing()).run()
    assert [outcome.num_cached > 0 for outcome in run.outcomes] == [False, False, True]


def test_streams_keep_two_thirds_of_their_speed_beside_a_flood() -> None:
    flood = [shows(0.1, f"{i}", output_len=1) for i in range(60)]
    for seconds in (2e-3, 10e-3, 50e-3):
        stream = Arrival(time=0.0, input_len=10, output_len=int(1 / seconds))
        steps = seeing()._replace(device=FLAT._replace(step=seconds))
        alone = simulator([stream], steps).run().outcomes[0].tpot
        beside = simulator([stream, *flood], steps).run().outcomes[0].tpot
        assert alone / beside == pytest.approx(0.7, abs=0.1), seconds


def test_those_for_which_there_is_no_room_wait() -> None:
    arrivals = [shows(0.0, f"{i}") for i in range(3)]
    run = simulator(arrivals, seeing(max_embeddings=48)).run()
    assert [outcome.error for outcome in run.outcomes] == [""] * 3
    assert run.outcomes[2].ttft > 150e-3
    for without in (machine(FLAT), seeing(max_embeddings=47)):
        assert simulator(arrivals[:1], without).run().outcomes[0].error


def test_costs_are_found() -> None:
    costs = EncodeCosts(3e-3, 2e-4, 1e-6)
    found = fit_encoding([(count, costs.seconds(count)) for count in (16, 64, 100, 256, 400, 30)])
    for count in (20, 200, 600):
        assert found.seconds(count) == pytest.approx(costs.seconds(count), rel=0.02)
    of_one_size = fit_encoding([(256, 0.5)] * 3)
    assert (of_one_size.seconds(256), of_one_size.seconds(64)) == pytest.approx((0.5, 0.125))


def test_files_of_loads_have_them(tmp_path: Path) -> None:
    arrivals = [shows(0.0, "cat", "dog"), shows(1.0)]
    write(tmp_path / "load", arrivals)
    assert read(tmp_path / "load") == arrivals


def recording(path: Path, *, has_costs: bool) -> Path:
    """A request with an image, which took 60 ms, and steps of 4 ms; one of them came late because of it."""
    hello = seeing().hello(Config())
    lines: list[AnyLine] = [
        Header(version=1, run="a", part=0, unix_time=0.0, program="", options={"scheduler": {}}, has_tokens=False),
        Worker(at=0.0, hello=told(hello)),
        RecordedArrival(
            at=1.0, id="r", num_tokens=64, digest="", images=(RecordedImage("k", 4, 48, 48, (1, 8, 24), 99),)
        ),
        *[Encoded(at=1.2, num_embeddings=48, us=60_000), Encoded(at=1.3, num_embeddings=0, us=1)] * has_costs,
        Encoded(at=1.3, num_embeddings=8, failed=True),
    ]
    for step in range(40):
        at = 1.0 + 0.005 * step
        lines.append(plan(step, at, 39 + step, 1))
        lines.append(Result(at=at + 0.0055, step=step, forward_us=4000, idle_us=3000 if step < 38 else 100))
    lines.append(End(at=1.3, id="r", reason="length", num_tokens=31, first_token_at=1.25))
    path.write_bytes(b"".join(encoded(line, msgspec.json.Encoder()) for line in lines))
    return path


def test_what_a_recording_says_of_images(tmp_path: Path) -> None:
    found = measured(recording(tmp_path / "run", has_costs=True))
    assert found.arrivals[0].images == (ShownImage("k", 4, 48, 48),)
    tower = found.machine.tower
    assert tower is not None
    assert tower[1:] == (8, 8000, False)
    assert tower.costs.seconds(48) == pytest.approx(60e-3)
    walk = found.machine.device.walk(0)
    assert max(walk.gap(shape) for shape in [step.shape for step in found.steps] * 10) < 3e-3, (
        "the tower's turns are no gaps"
    )
    assert simulator(found.arrivals, found.machine, pipeline_depth=0).run().outcomes[0].ttft > 60e-3
    with pytest.raises(ConfigError, match="not what encoding these took"):
        measured(recording(tmp_path / "older", has_costs=False))
