"""Tokens are the same whether a prefix was computed, or read from a disk that another engine wrote to."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from penstock.ipc.messages import SamplingParams
from penstock.parts.disk.scheduler import moves as disk_moves
from penstock.parts.disk.scheduler.moves import DiskMoves
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine

Make = Callable[..., Checkpoint]

PROMPTS = prompts((133, 45, 64, 90), seed=3)
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0)


def opened(folder: Path, **options: object) -> Engine:
    """An engine that reads what it finds, although such a model computes quicker than it reads."""
    engine = Engine(folder, pipeline_depth=1, **options)
    disk = engine.scheduler.parts.get(DiskMoves)
    assert disk is not None
    disk._predict_us = lambda start, num_tokens: 0.0
    return engine


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-some-windows"])
@pytest.mark.parametrize("host_gib", [0.0, 0.01])
def test_another_engine_reads_what_was_written(
    checkpoint: Make, name: str, host_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 16)
    folder = checkpoint(name)[0]
    alone = Engine(folder, pipeline_depth=1)
    expected = [alone.run([prompt], SAMPLING)[0][0] for prompt in PROMPTS]
    options = {"disk_kv": f"{tmp_path}:0.1", "host_kv_gib": host_gib, "num_pages": 60}
    for has_pages in (False, True):
        engine = opened(folder, **options)
        try:
            assert [engine.run([prompt], SAMPLING)[0][0] for prompt in PROMPTS] == expected
            stats = engine.scheduler.stats().disk
            assert (stats.num_loaded > 10) == has_pages
            assert stats.num_cached > 10
            assert stats.num_damaged == stats.num_failed == 0
        finally:
            engine.close()
    other = Engine(folder, page_size=8, **options)
    try:
        assert other.scheduler.stats().disk.num_cached == 0, "other pages are not taken for these"
    finally:
        other.close()


def test_damaged_files_and_a_disk_that_cannot_be_written(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 16)
    folder = checkpoint("llama")[0]
    alone = Engine(folder, pipeline_depth=1)
    expected = [alone.run([prompt], SAMPLING)[0][0] for prompt in PROMPTS]
    options = {"disk_kv": f"{tmp_path}:0.1"}
    rng, num_damaged = Random(0), 0
    for damage in range(5):
        engine = opened(folder, **options)
        try:
            if damage == 4:  # nothing can be written there any more
                (file,) = tmp_path.glob("*/*.kv")
                file.unlink()
                file.mkdir()
            assert [engine.run([prompt], SAMPLING)[0][0] for prompt in PROMPTS] == expected
            stats = engine.scheduler.stats().disk
            num_damaged += stats.num_damaged
            assert stats.is_writing == (damage < 4)
            assert (stats.num_failed > 0) == (damage == 4)
        finally:
            engine.close()
        if damage < 3:
            (file,) = tmp_path.glob("*/*.kv")
            content = bytearray(file.read_bytes())
            for _ in range(20):
                content[rng.randrange(200_000, len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content[: len(content) - 3000 * damage])
    assert num_damaged > 5
