"""Models in stages: the same tokens and log-probabilities as from one worker, whatever the schedule.

The stages are in this process, and go on in the order that a seed draws.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.gpu_worker.startup.start import Started
from penstock.ipc.messages import SamplingParams, SequenceDelta
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.rank_parts import rank_parts
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary
from penstock.models.shards.stages import most_stages
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.worker.masks import Grammars
from tests.e2e.checkpoints import make_checkpoint as make_byte_checkpoint
from tests.gpu_worker.checkpoints import make_checkpoint, prompts
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import GREEDY, texts_of
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.parallel.stages_in_process import StagedEngine, overlaps

IS_LONG = bool(os.environ.get("PENSTOCK_SOAK"))
NUM_NEW = 20
PROMPTS = prompts((1, 45, 17, 64, 33), seed=1)
SAMPLING = [
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0, num_logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1, num_logprobs=0),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
]
PLAIN = [each for each in SAMPLING if each.num_logprobs < 0]


class Noted:
    """Keeps all deltas of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.deltas: list[SequenceDelta] = []
        take = engine._take

        def note(delta: SequenceDelta) -> None:
            take(delta)
            self.deltas.append(delta)

        engine._take = note  # type: ignore[method-assign]

    def scores(self) -> dict[tuple[str, bool], tuple[list[int], bytes]]:
        """Of each request, of its prompt or its output: the ranks, and the ids; of floats only how many there are."""
        found: dict[tuple[str, bool], tuple[list[int], bytes]] = {}
        for delta in self.deltas:
            for is_prompt, table in ((True, delta.prompt_logprobs), (False, delta.logprobs)):
                if table is not None:
                    ranks, ids = found.get((delta.request_id, is_prompt), ([], b""))
                    found[delta.request_id, is_prompt] = [*ranks, *table.ranks], ids + table.token_ids
        return found


@contextmanager
def staged(folder: Path, num_stages: int, **options: Any) -> Iterator[StagedEngine]:
    engine = StagedEngine(folder, num_stages=num_stages, **options)
    try:
        yield engine
    finally:
        engine.close()


def check(folder: Path, num_stages: int, *, sampling: list[SamplingParams] = SAMPLING, **options: Any) -> StagedEngine:
    """The prompts on one worker and on stages."""
    texts = PROMPTS[: len(sampling)]
    one = Engine(folder, **{name: its for name, its in options.items() if name not in ("seed", "layers")})
    known = Noted(one)
    expected = one.run(texts, sampling)
    with staged(folder, num_stages, **options) as engine:
        noted = Noted(engine)
        assert engine.run(texts, sampling) == expected
        assert noted.scores() == known.scores()
        assert overlaps(engine.stages.log) > 0, "stages work at the same time"
    return engine


# --- models -------------------------------------------------------------------------------------------

USUAL = (
    ("llama", "torch", 3),
    ("llama-mha-tied", "native", 2),
    ("qwen3-layer-types", "native", 2),
    ("mistral-window", "torch", 2),
)
NAMES = (
    "llama",
    "llama-mha-tied",
    "llama-dynamic",
    "mistral-window",
    "qwen2",
    "qwen2-some-windows",
    "qwen3-layer-types",
)


@pytest.mark.parametrize(
    ("name", "kernels", "num_stages"),
    [(name, kernels, n) for name in NAMES for kernels in ("torch", "native") for n in (2, 3)] if IS_LONG else USUAL,
)
def test_models(tmp_path: Path, name: str, kernels: str, num_stages: int) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name == "qwen3-layer-types" else {}
    make_checkpoint(tmp_path, name, num_hidden_layers=4, **layers)
    check(tmp_path, num_stages, cpu_kernels=kernels, max_num_batched_tokens=64, pipeline_depth=1)


@pytest.mark.parametrize(("kernels", "quantization"), [("native", "int4"), ("torch", "int8")])
def test_quantized(tmp_path: Path, kernels: str, quantization: str) -> None:
    make_checkpoint(tmp_path, "llama-mha-tied", num_hidden_layers=3)
    check(tmp_path, 2, cpu_kernels=kernels, quantization=quantization, sampling=PLAIN)


FAMILIES = tuple(CASES) if IS_LONG else ("mixtral", "glm_moe_dsa-shared", "gpt2", "gemma3")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    texts = texts_of(Reference(tmp_path, CASES[name]).case)
    options: dict[str, Any] = {
        "cpu_kernels": ("native", "torch")[FAMILIES.index(name) % 2],
        "max_num_batched_tokens": 48,
    }
    expected = Engine(tmp_path, **options).run(texts, GREEDY)
    decoder = parse_model_config(open_checkpoint(tmp_path).config)
    if not isinstance(decoder, Decoder) or decoder.state_layers or most_stages(decoder) == 1:
        with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
            StagedEngine(tmp_path, num_stages=2, **options)
        return
    with staged(tmp_path, 2, **options) as engine:
        assert engine.run(texts, GREEDY) == expected


# --- schedules ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    return tmp_path


@pytest.mark.parametrize("seed", range(12 if IS_LONG else 3))
@pytest.mark.parametrize("cached", [False, True])
def test_preemption_chunks_and_prefixes(folder: Path, seed: int, cached: bool) -> None:
    """A pool that hardly holds the longest text, steps of a few tokens, and every text twice."""
    rng = Random(seed)
    options = schedule(rng.choice((7, 16, 64)), rng.choice((4, 8)), rng.randrange(3), num_tokens=112, cached=cached)
    expected = Engine(folder, cpu_kernels="native").run(PROMPTS, SAMPLING)
    with staged(folder, rng.choice((2, 3)), cpu_kernels="native", seed=seed, **options) as engine:
        for _ in range(2):
            assert engine.run(PROMPTS, SAMPLING) == expected
        assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(("kernels", "num_stages", "depth"), [("native", 2, 1), ("torch", 3, 2)])
def test_drafts(folder: Path, kernels: str, num_stages: int, depth: int) -> None:
    """The number of tokens that a step brings is known where they are drawn, and the other stages follow."""
    expected = Engine(folder, cpu_kernels=kernels).run(PROMPTS, SAMPLING)
    known = [[*prompt, *each[0]] for prompt, each in zip(PROMPTS, expected, strict=True)]
    options = schedule(48, 8, depth, num_tokens=200)
    with staged(folder, num_stages, cpu_kernels=kernels, texts=known, **options) as engine:
        assert engine.run(PROMPTS, SAMPLING) == expected
        totals = engine.scheduler.totals
        assert totals.num_steps < sum(len(each[0]) for each in expected), "some drafts were right"


def test_another_scheduler_takes_over_in_the_middle(folder: Path) -> None:
    """Some stages never get a plan that others have computed: what is left of it is dropped."""
    expected = Engine(folder, cpu_kernels="native").run(PROMPTS, SAMPLING)
    with staged(folder, 3, cpu_kernels="native", pipeline_depth=2) as engine:
        for epoch in range(1, 6):
            ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]
            for _ in range(4 * epoch):
                engine.step()
            engine.stages.clear_rows(epoch)
            engine._pending.clear()
            engine.scheduler.reset_worker(engine.hello, has_died=False)
            for request_id in ids:
                engine.scheduler.abort(request_id)
        assert engine.run(PROMPTS, SAMPLING) == expected


def test_grammars(tmp_path: Path) -> None:
    """The last stage alone prepares and follows them; the others leave the drafts of such rows alone, as it does."""
    make_byte_checkpoint(tmp_path)
    vocabulary = grammar_vocabulary(open_checkpoint(tmp_path))
    grammar = read_grammar(vocabulary, "json", json.dumps({"enum": ["one", "two", "three"]})).text
    sampling = [
        SamplingParams(max_tokens=12, grammar=grammar, stop_token_ids=(2,), seed=3),
        SamplingParams(max_tokens=12, seed=4),
        SamplingParams(max_tokens=12, grammar=grammar, stop_token_ids=(2,), temperature=0.0),
    ]
    texts = [[1, 50, 60, 70 + i] for i in range(3)]
    expected = Engine(tmp_path).run(texts, sampling)
    known = [[*text, *each[0]] for text, each in zip(texts, expected, strict=True)]
    for given in (None, known):
        with staged(tmp_path, 2, layers="1,1", texts=given) as engine:
            assert engine.run(texts, sampling) == expected
            assert [grammars_of(each).store.num_known for each in engine.stages.started] == [0, 1]


def grammars_of(started: Started) -> Grammars:
    (found,) = (part for part in started.parts if isinstance(part, Grammars))
    return found


# --- what each stage holds --------------------------------------------------------------------------------


def test_memory_and_bytes(folder: Path) -> None:
    """Each stage reads its own tensors only, and a page has its own layers' part."""
    whole = Engine(folder)
    with staged(folder, 3, layers="1,1,1") as engine:
        hellos = [each.hello for each in engine.stages.started]
        assert [hello.answers for hello in hellos] == [False, False, True]
        assert {hello.num_stages for hello in hellos} == {3}
        assert sum(hello.page_bytes for hello in hellos) == whole.hello.page_bytes
        read = [each.bytes_read for each in engine.stages.started]
    in_files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert in_files - 16384 < sum(read) <= in_files
    embedding = 4 * 199 * 64
    assert read[0] == read[1] + embedding
    assert read[2] == read[1] + embedding + 4 * 64
    decoder = parse_model_config(open_checkpoint(folder).config)
    assert isinstance(decoder, Decoder)
    planned = rank_parts(Costs(decoder, "fp32", "fp32"), ParallelOptions(pipeline_parallel_size=3))
    assert [part.weight_bytes for part in planned] == read
    assert [part.costs.kv_bytes(16) for part in planned] == [hello.page_bytes for hello in hellos]


def test_pages_of_windows_are_the_same_on_all_stages(tmp_path: Path) -> None:
    """A stage may have no layer of a group; its page tables are there nevertheless."""
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    make_checkpoint(tmp_path, "qwen3-layer-types", num_hidden_layers=4, layer_types=kinds)
    whole = Engine(tmp_path)
    with staged(tmp_path, 2, layers="2,2") as engine:
        for each in engine.stages.started:
            assert each.hello.window_groups == whole.hello.window_groups
            assert each.hello.window_groups
        layers = [[group.layers for group in each.runner._kv.groups] for each in engine.stages.started]
    assert layers == [[(0, 1), ()], [(), (0, 1)]]
