"""Which layers the stages of a pipeline have, and which plans they get."""

import json
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from bench.shapes_folder import shape_folder
from penstock.config import ConfigError
from penstock.config.flags import config_from
from penstock.config.groups.parallel import ParallelOptions
from penstock.core.scheduling.decode_parts import DecodeParts
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.prefill_pace import chunk_for_stages
from penstock.ipc.codec import unpack_int32
from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.device import Timing
from penstock.models.check import check_checkpoint
from penstock.models.description.decoder import Attention, Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.quantization import with_quantization
from penstock.models.shards.stages import most_stages, stage_costs, stage_ranges, stage_shares
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.e2e.checkpoints import make_checkpoint
from tests.lab.simulation.loads import KnownDevice, machine, simulator

SHAPES = ("llama-3.1-8b", "qwen2.5-0.5b", "gemma-3-1b", "moe-8x2-0.5b")


def decoder_of(shape: str) -> Decoder:
    decoder = parse_model_config(json.loads((shape_folder(shape) / "config.json").read_text()))
    assert isinstance(decoder, Decoder)
    return decoder


# --- layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantization", ["", "int4"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_other_ranges_have_a_cheaper_costliest_stage(shape: str, quantization: str, num_stages: int) -> None:
    decoder = with_quantization(decoder_of(shape), quantization)
    assert isinstance(decoder, Decoder)
    ranges, costs = stage_ranges(decoder, num_stages), stage_costs(decoder)
    assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == len(costs)
    slowest = max(sum(costs[first:end]) for first, end in ranges)

    def stages_within(most: int) -> int:
        """How many are needed if none may cost more: each takes as many layers as it can."""
        count, left = 1, most
        for cost in costs:
            if cost > most:
                return len(costs) + 1
            if cost > left:
                count, left = count + 1, most
            left -= cost
        return count

    assert stages_within(slowest) <= num_stages
    assert stages_within(slowest - 1) > num_stages
    assert sum(stage_shares(decoder, num_stages)) == pytest.approx(1)


def test_the_head_counts() -> None:
    """A vocabulary of 128,256 weighs as much as two and a half layers of the 8B model."""
    assert stage_ranges(decoder_of("llama-3.1-8b"), 2) == ((0, 17), (17, 32))
    assert stage_ranges(decoder_of("qwen2.5-0.5b"), 2)[0][1] > 14


def test_layers_that_share_keys_and_values_stay_together() -> None:
    whole = decoder_of("llama-tiny")
    layers = [whole.layers[0]] * 6
    mixer = layers[0].mixer
    assert isinstance(mixer, Attention)
    layers[4] = replace(layers[4], mixer=replace(mixer, shares_kv_of=2))
    decoder = replace(whole, layers=tuple(layers))
    assert most_stages(decoder) == 4
    assert all(end not in (3, 4) for _, end in stage_ranges(decoder, 4))
    with pytest.raises(ConfigError, match="at most 4 stages"):
        stage_ranges(decoder, 5)
    with pytest.raises(ConfigError, match="layer 3 or one after it"):
        stage_ranges(decoder, 2, "3,3")
    assert stage_ranges(decoder, 2, "5, 1") == ((0, 5), (5, 6))


@pytest.mark.parametrize(
    ("num_stages", "given"), [(2, "10"), (2, "10,12"), (2, "24,0"), (2, "a,b"), (1, "20"), (3, "12,12")]
)
def test_ranges_that_cannot_be(num_stages: int, given: str) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_layers {given}: {num_stages} numbers are needed.* 24 layers"):
        stage_ranges(decoder_of("qwen2.5-0.5b"), num_stages, given)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 25: the model has only 24 layers"):
        stage_ranges(decoder_of("qwen2.5-0.5b"), 25)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_layers": "1,1"}, "pipeline_layers has no effect"),
        ({"pipeline_parallel_size": 2, "disk_kv": "x:1"}, "2 workers has no disk tier"),
        ({"pipeline_parallel_size": 2, "role": ("prefill",)}, "--role: pages cannot be handed over between pipelines"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(Namespace(**options), {})


def test_what_cannot_be_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    check = partial(check_checkpoint, open_checkpoint(tmp_path))
    check(parallel=ParallelOptions(pipeline_parallel_size=2, pipeline_layers="1,1"))
    for layers, words in (("1,2", "2 numbers are needed"), ("2", "2 numbers are needed")):
        with pytest.raises(ConfigError, match=words):
            check(parallel=ParallelOptions(pipeline_parallel_size=2, pipeline_layers=layers))
    with pytest.raises(ConfigError, match="has only 2 layers"):
        check(parallel=ParallelOptions(pipeline_parallel_size=3))


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_parts_are_disjoint_and_equally_large(num_parts: int) -> None:
    rng, driver = Random(num_parts), Driver()
    for i in range(6):
        driver.add(make_request(f"r{i}", [1, 2, 3], n=8))
    seqs = [seq for request in driver.scheduler.requests.values() for seq in request.waiting]
    decodes: dict[Sequence, None] = {}
    parts = DecodeParts(num_parts)
    for _ in range(400):
        seq = rng.choice(seqs)
        if seq in decodes:
            del decodes[seq]
            parts.leave(seq)
        else:
            decodes[seq] = None
            parts.join(seq)
        batches = [parts.next_batch() for _ in range(min(num_parts, max(1, len(decodes))))]
        assert sorted(map(id, (seq for batch in batches for seq in batch.seqs))) == sorted(map(id, decodes))
        sizes = [len(batch.seqs) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert parts.next_batch() is batches[0], "nothing is made anew while nobody joins or leaves"
        for _ in batches[1:]:
            parts.next_batch()


@pytest.mark.parametrize(("num_stages", "depth"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2)])
def test_there_is_a_plan_for_each_stage(num_stages: int, depth: int) -> None:
    driver = Driver(num_stages=num_stages, pipeline_depth=depth)
    requests = [make_request(f"r{i}", [i, 5, 6, 7], 20) for i in range(6)]
    for request in requests:
        driver.add(request)
    driver.step()
    while driver.schedule() is not None:
        pass
    assert len(driver.scheduler.in_flight) == num_stages + depth
    driver.run()
    for request in requests:
        expected = solo_run(list(unpack_int32(request.prompt_token_ids)), request.sampling, 0, driver.limits)
        assert driver.outputs[request.request_id, 0] == expected
    rows = [set(unpack_int32(step.plan.rows)) for step in driver.steps[1:]]
    assert all(not here & after for here, after in pairwise(rows)) == (num_stages > 1)


def test_prompts_come_in_pieces_for_all_stages() -> None:
    limits = make_limits(num_pages=1024, max_num_batched_tokens=2048, max_model_len=4096)
    for num_stages, most in ((1, 2048), (2, 256), (4, 128)):
        driver = Driver(limits, num_stages=num_stages)
        assert driver.add(make_request("a", [i % 1000 for i in range(2000)], 1)) is None
        driver.run()
        sizes = [sum(unpack_int32(step.plan.num_new)) for step in driver.steps]
        assert max(sizes) <= most
        assert sum(sizes) == 2000
    assert chunk_for_stages(1 << 20, 2) > 2048, "many prompts fill steps as large as the options allow"


# --- time -------------------------------------------------------------------------------------------

DEVICE = KnownDevice(step=0.0, row=1e-3, context=0, token=1e-4, between=0.0)


def seconds(stages: tuple[float, ...], arrivals: list[Arrival]) -> float:
    run = simulator(arrivals, machine(DEVICE._replace(stages=stages), Timing())).run()
    return max(outcome.ended for outcome in run.outcomes)


def test_stages_work_at_the_same_time() -> None:
    """Many rows: n stages are n times as fast. One row waits for each of its tokens; stages then take turns."""
    many = [Arrival(time=0.0, input_len=1, output_len=100) for _ in range(24)]
    alone = seconds((1.0,), many)
    assert seconds((0.5, 0.5), many) == pytest.approx(alone / 2, rel=0.05)
    assert seconds((0.25,) * 4, many) == pytest.approx(alone / 4, rel=0.1)
    assert seconds((0.6, 0.4), many) == pytest.approx(alone * 0.6, rel=0.05), "all wait for the slowest"
    assert seconds((0.5, 0.5), many[:1]) == pytest.approx(seconds((1.0,), many[:1]))


def test_a_long_prompt_goes_through_the_stages_in_pieces() -> None:
    prompt = [Arrival(time=0.0, input_len=2000, output_len=1)]
    alone = seconds((1.0,), prompt)
    assert seconds((0.5, 0.5), prompt) < 0.6 * alone
    assert seconds((0.25,) * 4, prompt) < 0.35 * alone
