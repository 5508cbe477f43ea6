"""A step's latent attention: each row in the way that costs less, which changes nothing but rounding."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.device import MemoryUse
from penstock.gpu_worker.models import latent_attention
from penstock.gpu_worker.models.latent_attention import Absorbed, LatentPages, _sizes_of
from penstock.gpu_worker.models.model import ForwardInputs, Model
from penstock.gpu_worker.startup.memory_profile import pool_budget
from penstock.gpu_worker.state.kv_pool import KVPool, PageGroup
from penstock.models.description.decoder import LatentAttention, Norm
from penstock.models.description.model_config import KVShape
from penstock.models.parsing.rope import RopeConfig
from tests.gpu_worker.engine_in_process import make_config

ITS = LatentAttention(
    num_heads=3,
    q_rank=None,
    kv_rank=32,
    nope_dim=16,
    rope_dim=8,
    v_dim=24,
    scale=0.2,
    rope=RopeConfig(kind="default", dim=8, theta=1e4, original_max_len=512),
    norm=Norm(),
)
ROWS = ((1, 30), (1, 4), (40, 40), (36, 50), (8, 90), (25, 25), (1, 1))
"""New tokens, and the length with them: decodes, two prompts, a short chunk of a long one, a prompt, a decode."""


def inputs_of(rows: tuple[tuple[int, int], ...], page_size: int) -> ForwardInputs:
    """Rows with pages of their own, in order."""
    counts = [-(-length // page_size) for _, length in rows]
    table = torch.full((len(rows), max(counts)), 9999, dtype=torch.int32)
    for row, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        table[row, :count] = torch.arange(end - count, end)
    num_new, lengths = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    num_tokens = int(num_new.sum())
    return ForwardInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        rows=torch.arange(len(rows), dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        query_start_loc=torch.tensor([0, *num_new.cumsum().tolist()], dtype=torch.int32),
        seq_lens=torch.from_numpy(lengths),
        page_table=table,
        max_query_len=int(num_new.max()),
        max_seq_len=int(lengths.max()),
        host_lens=(num_new, lengths),
    )


@pytest.mark.parametrize("rows", [ROWS, ROWS[2:4], ROWS[:2]])
@pytest.mark.parametrize(("contexts", "expanded"), [(1 << 20, 1 << 20), (60, 60 * 40 * 2), (1, 1)])
def test_the_choice_of_ways_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[tuple[int, int], ...], contexts: int, expanded: int
) -> None:
    """Also in small pieces, of rows and of heads."""
    monkeypatch.setattr(latent_attention, "_CONTEXTS", contexts)
    monkeypatch.setattr(latent_attention, "_EXPANDED", expanded)
    torch.manual_seed(0)
    group = PageGroup((0,), 4, 1, 40, has_values=False)
    pool = KVPool((group,), 80, torch.float32, torch.device("cpu"))
    pool.blocks.normal_()
    inputs = inputs_of(rows, 4)
    q, kv_b = torch.randn(len(inputs.input_ids), 3, 24), torch.randn(3, 40, 32) / 6
    chosen = LatentPages(inputs, group).attend(q, kv_b, ITS, pool.layers[0])
    absorbed = LatentPages(inputs._replace(host_lens=None), group).attend(q, kv_b, ITS, pool.layers[0])
    torch.testing.assert_close(chosen, absorbed, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        (1 << 20, [(True, 2), (False, 76), (True, 8), (False, 25), (True, 1)]),
        (60, [(True, 2), (False, 40), (False, 36), (True, 8), (False, 25), (True, 1)]),
    ],
)
def test_rows_that_attend_in_the_same_way_go_together(
    monkeypatch: pytest.MonkeyPatch, contexts: int, expected: list[tuple[bool, int]]
) -> None:
    monkeypatch.setattr(latent_attention, "_CONTEXTS", contexts)
    parts = LatentPages(inputs_of(ROWS, 4), PageGroup((0,), 4, 1, 40, has_values=False))._make_plan(_sizes_of(ITS))
    assert [(isinstance(part, Absorbed), part.tokens.stop - part.tokens.start) for part in parts] == expected


class Measured(CpuDevice):
    """A device with memory of its own."""

    def measure(self, step: Callable[[], None]) -> MemoryUse | None:
        return MemoryUse(total=8 << 30, in_use=1 << 30, peak=1 << 20)


def test_memory_for_expanded_contexts_is_kept_free(tmp_path: Path) -> None:
    """The batch that is measured has none."""

    def budget(kv: KVShape) -> int:
        config = make_config(tmp_path, max_model_len=64, gpu_memory_utilization=0.5)
        model = cast(
            Model, SimpleNamespace(config=SimpleNamespace(kv=(kv,), max_model_len=64, num_layers=1, state_bytes=0))
        )
        return pool_budget(config, model, torch.bfloat16, torch.bfloat16, Measured(1)).pool

    latent, plain = KVShape(1, 576, 0, None), KVShape(1, 576, 576, None)
    assert budget(plain) - budget(latent) == 2 * latent_attention.scratch_numbers(576) < 300 << 20
