"""Rows that follow grammars: what they write matches, their neighbours do not notice, nothing else ends with them."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from torch import Tensor

from penstock.ipc.codec import deltas_of
from penstock.ipc.messages import SamplingParams, SequenceDelta
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.grammars.worker.masks import Grammars
from tests.gpu_worker.engine_in_process import Engine
from tests.gpu_worker.world import EOS, PROMPT, World
from tests.parts.grammars.worker.random_schemas import Schema, random_schema

NUM_SCHEMAS = int(os.environ.get("PENSTOCK_TEST_SCHEMAS", "200"))
"""2,000 take about ten times as long."""

RECORD: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("checkpoints") / "bytes")


class Tolerant(Engine):
    """Lets sequences fail, and notes why."""

    def _take(self, delta: SequenceDelta) -> None:
        key = (delta.request_id, delta.sequence_idx)
        self.outputs[key].extend(delta.token_ids)
        self.last_delta[key] = delta


@pytest.mark.timeout(1200)
def test_texts_under_random_schemas_parse_and_validate(world: World) -> None:
    engine = Engine(world.folder, pipeline_depth=1, max_num_seqs=32, num_pages=4000)
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    params = [world.params("json", schema, seed=i) for i, schema in enumerate(schemas)]
    for schema, [output] in zip(schemas, engine.run([PROMPT] * len(params), params), strict=True):
        assert output[-1] == EOS, (schema, world.text(output))
        text = world.text(output)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("depth", [0, 2])
def test_choice_regex_and_grammar(world: World, depth: int) -> None:
    engine = Engine(world.folder, pipeline_depth=depth)
    params = [
        world.params("choice", ["yes", "no, never", 'é "€"'], seed=3),
        world.params("regex", "[0-9]{3}-[a-f]{2}", seed=4),
        world.params("grammar", 'root ::= "<" [a-c] [a-c] ">"', seed=5),
        world.params("grammar", 'start: A "!"\nA: /[x-z]{2}/', temperature=0.0),
    ]
    [choice], [number], [gbnf], [lark] = engine.run([PROMPT] * 4, params)
    assert world.text(choice) in ("yes", "no, never", 'é "€"')
    assert len(world.text(number)) == 6
    assert world.text(gbnf)[0] + world.text(gbnf)[3] == "<>"
    assert len(world.text(lark)) == 3
    assert all(output[-1] == EOS for output in (choice, number, gbnf, lark))


class _LateDownload:
    """As from a GPU: the tokens come a while after the launch."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.numpy().tobytes()
        self._ready_at = time.monotonic() + 0.004

    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_at

    def wait(self) -> bytes:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._bytes


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_wait_for_tokens_that_are_on_their_way(world: World, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [world.params("regex", "([a-z]{3,9};){2,4}[0-9]{4,9}", seed=seed) for seed in range(3)]
    expected = Engine(world.folder).run([PROMPT] * 3, params)
    engine = Engine(world.folder, pipeline_depth=depth)
    monkeypatch.setattr(engine.runner._device, "download", _LateDownload)
    assert engine.run([PROMPT] * 3, params) == expected


@pytest.mark.parametrize("depth", [1])
def test_neighbours_get_the_tokens_they_get_alone(world: World, depth: int) -> None:
    free = [SamplingParams(max_tokens=40, temperature=t, top_p=0.9, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 1.3))]
    prompts = [[1, 40 + i, 80] for i in range(len(free))]
    alone = Engine(world.folder, pipeline_depth=depth).run(prompts, free)
    constrained = [world.params("json", RECORD, seed=seed) for seed in range(3)]
    mixed = Engine(world.folder, pipeline_depth=depth).run(
        [PROMPT, *prompts[:2], PROMPT, *prompts[2:], PROMPT],
        [constrained[0], *free[:2], constrained[1], *free[2:], constrained[2]],
    )
    assert [mixed[i] for i in (1, 2, 4, 5)] == alone


def test_the_text_is_the_same_at_any_depth_alone_and_after_preemption(world: World) -> None:
    pattern = "([a-z]{3,20};){2,4}[0-9]{4,9}"
    params = [world.params("regex", pattern, seed=seed, max_tokens=220) for seed in range(4)]
    prompts = [[1, 60 + i] * 8 for i in range(4)]
    alone = Engine(world.folder)
    expected = [alone.run([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert {output[-1] for [output] in expected} == {EOS}
    for depth in (0, 1, 2):
        tight = Engine(world.folder, pipeline_depth=depth, page_size=4, num_pages=48)
        assert tight.run(prompts, params) == expected
        assert tight.scheduler.totals.num_preemptions > 0


def test_a_lost_worker_costs_nothing_but_time(world: World) -> None:
    params = world.params("json", RECORD, seed=9)
    expected = Engine(world.folder, pipeline_depth=1).run([PROMPT], params)
    engine = Engine(world.folder, pipeline_depth=1)
    request_id = engine.add(PROMPT, params)
    assert engine.scheduler.schedule() is None  # its grammar is not ready
    engine.make_ready()
    for _ in range(12):
        step = engine.scheduler.schedule()
        assert step is not None
        for batch in engine.scheduler.process(engine.runner.launch(step.plan).result()).values():
            for delta in deltas_of(batch):
                engine._take(delta)
    engine.scheduler.reset_worker()
    engine.runner.clear_rows()
    engine.drain()
    assert engine.outputs[request_id, 0] == expected[0][0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("kind", "grammar", "options", "error"),
    [
        ("regex", "abc", {"min_tokens": 9}, "with min_tokens allows no token after the first 3"),
        ("regex", "abc", {"allowed_token_ids": (5,)}, "with allowed_token_ids allows no token after the first 0"),
        ("", "start: nothing", {}, "cannot be used"),
    ],
)
def test_a_row_without_a_next_token_fails_alone(
    world: World, depth: int, kind: str, grammar: str, options: dict[str, Any], error: str
) -> None:
    engine = Tolerant(world.folder, pipeline_depth=depth)
    if kind:
        bad = world.params(kind, grammar, seed=1, **options)
    else:  # unread: as if frontend and worker disagreed
        bad = SamplingParams(max_tokens=30, stop_token_ids=(EOS,), grammar=grammar)
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    good = world.params("json", RECORD, seed=2)
    _, [neighbour], [text] = engine.run([PROMPT, PROMPT, PROMPT], [bad, free, good])
    assert [neighbour] == Engine(world.folder).run([PROMPT], free)[0]
    jsonschema.validate(json.loads(world.text(text)), RECORD)
    failed = engine.last_delta["r0", 0]
    assert (failed.finish_reason, failed.error_code) == ("error", "grammar")
    assert error in failed.error
    assert engine.run([PROMPT], good) == [[text]]


def test_a_form_that_gets_stuck_ends_with_a_sentence_of_our_own(world: World) -> None:
    """As if the frontend had not noticed: no number is within these bounds as the library reads them."""
    number = {"type": "number", "multipleOf": 0.1, "minimum": 0.25, "maximum": 0.35}
    schema = {"type": "array", "minItems": 1, "prefixItems": [{"const": 1}, number], "items": False}
    stuck = LLMatcher.grammar_from_json_schema(
        json.dumps(schema | {"minItems": 2}), overrides={"whitespace_flexible": False}
    )
    engine = Tolerant(world.folder, pipeline_depth=1)
    engine.run([PROMPT], SamplingParams(max_tokens=30, stop_token_ids=(EOS,), grammar=stuck))
    failed = engine.last_delta["r0", 0]
    assert (failed.finish_reason, failed.error_code) == ("error", "grammar")
    assert re.fullmatch(
        r"the form allows nothing more, though it is not complete, after the first \d+ tokens", failed.error
    )


def test_a_complete_text_leaves_only_stop_tokens(world: World) -> None:
    extra = 40  # a stop token of the request's own
    engine = Engine(world.folder, pipeline_depth=1)
    params = [world.params("regex", "ab", seed=i, stop_token_ids=(EOS, extra)) for i in range(8)]
    outputs = engine.run([PROMPT] * 8, params)
    assert {world.text(output[:2]) for [output] in outputs} == {"ab"}
    assert {output[2] for [output] in outputs} == {EOS, extra}
    assert {len(output) for [output] in outputs} == {3}


def test_logprobs_are_the_models_own(world: World) -> None:
    """A mask changes what may be drawn, not how likely the model thinks it is."""
    params = world.params("regex", "ab", num_logprobs=2)
    engine = Engine(world.folder)
    engine.run([PROMPT], params)
    assert engine.last_delta["r0", 0].logprobs is not None


def test_a_tokenizer_that_cannot_be_used_fails_the_row(world: World, tmp_path: Path) -> None:
    engine = Tolerant(world.folder)
    grammars = Grammars(open_checkpoint(tmp_path), 259, engine.runner._device)
    engine.use([grammars])
    engine.runner.use([grammars])
    [[output]] = engine.run([PROMPT], world.params("regex", "ab"))
    assert output == []
    assert "cannot be used with this model's tokenizer" in engine.last_delta["r0", 0].error
