"""Trees of drafts: each node has the logits of its path, and whatever is guessed, the tokens are those without it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.ipc.messages import SamplingParams
from penstock.kernels.attention.paged_attention_cpu import NO_PATH
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits
from penstock.parts.drafts.worker.trees import DraftTree, first_path, path_table, positions_of, without_trees
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.table import CASES
from tests.kernels.pairs import every
from tests.parts.drafts.drafters import draft_with
from tests.parts.drafts.lengths import draft_always
from tests.parts.drafts.worker.remembered import RememberedTrees

Make = Callable[..., Checkpoint]
NUM_NEW = 24
PROMPTS = prompts((1, 45, 17, 64), seed=1)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SAMPLING = (
    GREEDY,
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, seed=11),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
)


def with_trees(engine: Engine, texts: list[list[int]]) -> list[int]:
    """Let an engine guess trees; returns a list that will have the number of nodes of each step with some."""
    num_nodes: list[int] = []
    compute = engine.runner._compute

    def note(batch: HostBatch, *rest: Any) -> Any:
        if batch.paths is not None:
            num_nodes.append(int((batch.paths[:, 0] != NO_PATH).sum()))
        return compute(batch, *rest)

    engine.runner._compute = note  # type: ignore[method-assign, assignment]
    draft_with(engine.runner, partial(RememberedTrees, texts))
    draft_always(engine.scheduler, RememberedTrees.max_drafts)
    return num_nodes


def check(folder: Path, *, num_runs: int = 1, **options: Any) -> Engine:
    expected = Engine(folder, **options | {"num_pages": 3200 // options["page_size"]}).run(PROMPTS, SAMPLING)
    texts = [prompt + each[0] for prompt, each in zip(PROMPTS, expected, strict=True)]
    engine = Engine(folder, **options)
    num_nodes = with_trees(engine, texts)
    for _ in range(num_runs):
        assert engine.run(PROMPTS, SAMPLING) == expected
    assert num_nodes
    assert max(num_nodes) > 10
    return engine


@pytest.mark.parametrize(
    ("depth", "kernels", "page_size", "kv", "is_tight"),
    every((0, 1, 2), ("native", "torch"), (1, 4, 16), ("auto", "int8", "int4", "fp8_e4m3"), (False, True)),
)
def test_tokens_are_those_of_the_plain_run(
    checkpoint: Make, depth: int, kernels: str, page_size: int, kv: str, is_tight: bool
) -> None:
    """Over borders of pages, with preemptions, and with requests that find what others have left in the cache."""
    folder, _ = checkpoint("llama")
    if kv != "auto" and page_size == 1:
        page_size = 2
    options = schedule(4096, page_size, depth, num_tokens=110 if is_tight else 3200, cached=True)
    engine = check(folder, num_runs=2, **options, cpu_kernels=kernels, kv_cache_dtype=kv)
    stats = engine.scheduler.stats()
    assert stats.num_cached_tokens or is_tight
    assert bool(stats.num_preemptions) == is_tight


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("depth", [0, 1])
def test_windows(checkpoint: Make, kernels: str, depth: int) -> None:
    """A page group with a window of 40 positions beside one that keeps all."""
    folder, _ = checkpoint("qwen3-layer-types")
    engine = check(folder, **schedule(4096, 4, depth, num_tokens=3200), cpu_kernels=kernels)
    assert len(engine.runner._kv.groups) == 2


def test_another_request_finds_what_a_tree_has_left_in_the_cache(checkpoint: Make) -> None:
    """Its prompt is the first one's prompt and output; its tokens are those of an engine that knows nothing."""
    folder, _ = checkpoint("llama")
    options = schedule(4096, 4, 1, num_tokens=3200, cached=True)
    plain = Engine(folder, **options).run(PROMPTS, replace(GREEDY, max_tokens=40))
    texts = [prompt + each[0] for prompt, each in zip(PROMPTS, plain, strict=True)]
    engine = Engine(folder, **options)
    num_nodes = with_trees(engine, texts)
    assert engine.run(PROMPTS, replace(GREEDY, max_tokens=30)) == [[each[0][:30]] for each in plain]
    assert num_nodes
    num_before = engine.scheduler.stats().num_cached_tokens
    later = [text[:-12] for text in texts]
    assert engine.run(later, replace(GREEDY, max_tokens=12)) == [[each[0][-12:]] for each in plain]
    assert engine.scheduler.stats().num_cached_tokens - num_before > sum(map(len, later)) - 4 * 4


class OneTree(Drafter):
    """The same tree for every row, once."""

    traits = Traits(guesses_trees=True)
    max_drafts = 7
    token_ids = (3, 7, 9, 11, 13, 7, 5)
    parents = (-1, 0, -1, 1, 0, 2, 3)

    def __init__(self, state: RowState) -> None:
        self.has_guessed = False

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        counts = np.zeros_like(rows) if self.has_guessed else np.full_like(rows, len(self.parents))
        self.has_guessed = True
        nodes = [
            np.tile(np.array(each, dtype=np.int32), int((counts > 0).sum())) for each in (self.token_ids, self.parents)
        ]
        return Guesses(counts, *nodes)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_each_node_has_the_logits_of_its_path(checkpoint: Make, kernels: str, kv: str) -> None:
    """Bit for bit with the native kernels."""
    folder, _ = checkpoint("llama")
    options = schedule(4096, 4, 0, num_tokens=3200) | {"cpu_kernels": kernels, "kv_cache_dtype": kv}
    engine = Engine(folder, **options)
    found = watch(engine)
    draft_with(engine.runner, OneTree)
    draft_always(engine.scheduler, OneTree.max_drafts)
    engine.run(PROMPTS, replace(GREEDY, max_tokens=10))
    in_trees = found[1].split(1 + OneTree.max_drafts)
    paths = DraftTree(0, 0, OneTree.token_ids, OneTree.parents).paths()
    plain = Engine(folder, **options)
    alone = watch(plain)
    for prompt, first, logits in zip(PROMPTS, found[0].argmax(-1).tolist(), in_trees, strict=True):
        for path, one in zip([[], *paths], logits, strict=True):
            tokens = [*prompt, first, *(OneTree.token_ids[node] for node in path)]
            plain.run([tokens], replace(GREEDY, max_tokens=1))
            if kernels == "native":
                assert torch.equal(alone[-1][0], one)
            else:
                torch.testing.assert_close(alone[-1][0], one, rtol=1e-4, atol=1e-4)


def watch(engine: Engine) -> list[Tensor]:
    """A list that will have the logits of each step."""
    found: list[Tensor] = []
    draw = engine.runner._sample

    def note(logits: Tensor, *rest: Any) -> Any:
        found.append(logits.clone())
        return draw(logits, *rest)

    engine.runner._sample = note  # type: ignore[method-assign, assignment]
    return found


def test_models_without_trees_get_the_chains_of_first_children(tmp_path: Path) -> None:
    folder = Reference(tmp_path, CASES["deepseek_v3"]).folder
    options = schedule(4096, 16, 1, num_tokens=3200)
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    engine = Engine(folder, **options)
    texts = [prompt + each[0] for prompt, each in zip(PROMPTS, expected, strict=True)]
    with structlog.testing.capture_logs() as logs:
        num_nodes = with_trees(engine, texts)
    assert [entry["reason"] for entry in logs] == ["latent attention knows chains only"]
    assert engine.run(PROMPTS, SAMPLING) == expected
    assert not num_nodes


def test_a_path_ends_where_no_child_is_right() -> None:
    tree = DraftTree(0, 10, (3, 7, 9, 11, 7), (-1, 0, -1, 1, 2))
    assert tree.paths() == [[0], [0, 1], [2], [0, 1, 3], [2, 4]]
    assert tree.right_draws([3, 7, 11, 0, 5, 0]) == [0, 1, 2, 4]
    assert tree.right_draws([9, 0, 0, 7, 0, 8]) == [0, 3, 5]
    assert tree.right_draws([4, 7, 11, 0, 5, 0]) == [0]
    assert tree.right_draws([-1, 7, 11, 0, 5, 0]) == [0]
    assert tree.right_draws([3, -2, 11, 0, 5, 0]) == [0], "the next step reaches the failed draw again"
    table = path_table(7, [(1, tree)])
    assert table[:, 0].tolist() == [NO_PATH, 11, 11, 11, 11, 11, NO_PATH]
    assert table[4].tolist() == [11, 11, 12, 14]
    assert table[5].tolist() == [11, 13, 15, 0]
    places = np.array([10, 11, 12, 13, 14, 15, 40], dtype=np.int32)
    assert positions_of(places, table).tolist() == [10, 11, 12, 11, 13, 12, 40]


def test_chains_of_first_children() -> None:
    assert first_path([-1, 0, -1, 1, 2]) == [0, 1, 3]
    assert first_path([]) == []
    parents = np.array([-1, -1, 1, -1, 0, 0], dtype=np.int32)
    guesses = Guesses(np.array([3, 0, 3], dtype=np.int32), np.arange(6, dtype=np.int32), parents)
    cut = without_trees(guesses, [True, True, False])
    assert (cut.counts.tolist(), cut.token_ids.tolist()) == ([1, 0, 3], [0, 3, 4, 5])
    assert cut.parents is not None
    assert cut.parents.tolist() == [-1, -1, 0, 0]
    chains = without_trees(guesses, [True, True, True])
    assert (chains.counts.tolist(), chains.token_ids.tolist(), chains.parents) == ([1, 0, 2], [0, 3, 4], None)
