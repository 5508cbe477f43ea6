"""Adapters that take turns on the device: the host keeps what was read, and whoever leaves while it is read is gone."""

import threading
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.adapters import Adapters, Factors, Site, SitePart
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.ipc.messages import SamplingParams
from penstock.kernels.activation import Activation
from penstock.models.weights.sources import WHOLE
from penstock.parts.adapters.messages import PrepareAdapter
from penstock.parts.adapters.worker.files import AdapterError, read_adapter
from penstock.parts.adapters.worker.rows import AdapterRows
from penstock.parts.adapters.worker.store import AdapterStore
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.adapters.test_parity import PROMPTS, assert_greedy, gate_of, load, run
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
SILU = Activation("silu")


class _Fused:
    """A product of a kernel that also computes the activation, with bits of its own."""

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        raise AssertionError("the activation comes first")

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return x.new_full((len(x), 3), 7.0)


def rows_of(engine: Engine) -> AdapterRows:
    return next(part for part in engine.parts if isinstance(part, AdapterRows))


def with_three(checkpoint: Make, folder: Path, **options: Any) -> tuple[Engine, dict[str, Any]]:
    """An engine with room for one of three adapters, whose files are gone once they were read; the merged models."""
    base, model = checkpoint("llama")
    engine = Engine(base, max_loras=1, **options)
    merged = {}
    for number in range(3):
        key = f"a{number}@1"
        merged[key] = write_adapter(folder / key, model, seed=number)
        load(engine, key, folder / key)
        engine.make_ready()
        rmtree(folder / key)
    return engine, merged


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_files_are_read_once(checkpoint: Make, tmp_path: Path, kernels: str) -> None:
    engine, merged = with_three(checkpoint, tmp_path, cpu_kernels=kernels)
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    for (prompt, key), output in zip(asks, run(engine, asks), strict=True):
        assert_greedy(merged[key], prompt, output)


def test_the_host_keeps_so_many(checkpoint: Make, tmp_path: Path) -> None:
    engine, merged = with_three(checkpoint, tmp_path, cpu_kernels="native", max_cpu_loras=1)
    [output] = run(engine, [(PROMPTS[0], "a2@1")])
    assert_greedy(merged["a2@1"], PROMPTS[0], output)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=1), adapter="a0@1")
    deltas = [delta for _ in range(2) for delta in engine.step().deltas]
    assert "cannot read" in next(delta.error for delta in deltas if delta.error)


def test_the_host_keeps_so_many_bytes(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    rows = rows_of(Engine(folder, cpu_kernels="native"))
    write_adapter(tmp_path / "a", model)
    write_adapter(tmp_path / "b", model)
    its = rows._store
    num_bytes = its.find("a", tmp_path / "a").made.num_bytes
    small = AdapterStore(rows._adapters, its._dtype, max_rank=256, max_num=9, max_bytes=num_bytes)
    first = small.find("a", tmp_path / "a")
    assert small.find("a", tmp_path / "a") is first
    small.find("b", tmp_path / "b")
    assert small.find("a", tmp_path / "a") is not first  # b has taken its place
    small.forget("a")
    rmtree(tmp_path / "a")
    with pytest.raises(AdapterError, match="cannot read"):
        small.find("a", tmp_path / "a")


def test_one_that_is_forgotten_while_it_is_read(checkpoint: Make, tmp_path: Path, monkeypatch: Any) -> None:
    folder, model = checkpoint("llama")
    rows = rows_of(Engine(folder, cpu_kernels="native"))
    write_adapter(tmp_path / "a", model)
    its = rows._store
    made = rows._adapters.made

    def forgotten(factors: Any) -> Any:
        its.forget("a")
        return made(factors)

    monkeypatch.setattr(rows._adapters, "made", forgotten)
    first = its.find("a", tmp_path / "a")
    assert its.find("a", tmp_path / "a") is not first  # it was not kept


def test_one_that_is_unloaded_while_it_is_read(checkpoint: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing waits for it for ever, and its slot is free."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1)
    merged = write_adapter(tmp_path / "a", model)
    may_read = threading.Event()
    monkeypatch.setattr(rows_of(engine), "_before", may_read.wait)
    gate = gate_of(engine)
    load(engine, "a@1", tmp_path / "a")
    engine._order(before_plan=True)
    gate.unload("a@1")
    gate.forget(set())
    engine._order(before_plan=True)
    may_read.set()
    for _ in range(100):
        engine._exchange([], seconds=0.1)
        if not gate.num_in_making:
            break
    assert gate.num_in_making == 0
    load(engine, "a@2", tmp_path / "a")
    [output] = run(engine, [(PROMPTS[0], "a@2")])
    assert_greedy(merged, PROMPTS[0], output)


def test_the_largest_rank(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_lora_rank=4)
    for rank in (4, 5):
        write_adapter(tmp_path / f"{rank}", model, rank)
        load(engine, f"{rank}", tmp_path / f"{rank}")
    engine.make_ready()
    assert gate_of(engine).known["4"].state == "ready"
    assert "is 5, more than --max-lora-rank 4" in gate_of(engine).known["5"].error


def test_ranks_of_peft(checkpoint: Make, tmp_path: Path) -> None:
    """The largest that are served from the start."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native")
    merged = write_adapter(tmp_path / "one", model, 256, ("q_proj", "down_proj"))
    load(engine, "one@1", tmp_path / "one")
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, "one@1") for prompt in PROMPTS]), strict=True):
        assert_greedy(merged, prompt, output)
    with pytest.raises(AdapterError, match="more than --max-lora-rank 8"):
        read_adapter(tmp_path / "one", rows_of(engine)._store._modules, rows_of(engine)._store._dtype, 8)


def test_a_product_that_computes_the_activation_itself() -> None:
    """It still does, whether or not some rows add something: so the bits of the others stay."""
    adapters, device = Adapters(), CpuDevice(1)
    product = adapters.add_site(cast(Linear, _Fused()), Site((SitePart("m", 3, 2, WHOLE),), None))
    adapters.prepare(num_slots=1, num_rows=2)
    x, step = torch.randn(2, 4), cast(ForwardInputs, None)
    alone = product.of_activation(x, SILU, step)
    assert alone.eq(7).all()
    adapters.put(0, adapters.made({"m": Factors(torch.ones(1, 2), torch.ones(3, 1))}))
    adapters.give([(1, 0)])
    adapters.begin(np.array([0, 1]), np.array([1, 1]), device)
    both = product.of_activation(x, SILU, step)
    assert both[0].equal(alone[0])
    torch.testing.assert_close(both[1], alone[1] + SILU(x)[1].sum())


def test_a_gguf_file(checkpoint: Make, tmp_path: Path) -> None:
    engine = Engine(checkpoint("llama")[0], cpu_kernels="native")
    load(engine, "one", tmp_path / "one.gguf")
    engine.make_ready()
    assert "it is a GGUF file" in gate_of(engine).known["one"].error


def test_who_waits_for_room_gets_it_from_one_that_nobody_asked_for(checkpoint: Make, tmp_path: Path) -> None:
    """Be it read, or refused."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1)
    merged = write_adapter(tmp_path / "good", model)
    load(engine, "good@1", tmp_path / "good")
    for other in ("unknown", "good"):  # the first one is refused
        load(engine, f"other-{other}", tmp_path / other)
        ids = [
            engine.add(prompt, SamplingParams(max_tokens=12, temperature=0.0), adapter="good@1") for prompt in PROMPTS
        ]
        for _ in range(200):
            for delta in engine.step().deltas:
                engine._take(delta)
        assert not engine.has_work
        for prompt, request_id in zip(PROMPTS, ids, strict=True):
            assert_greedy(merged, prompt, engine.outputs[request_id, 0])
    assert gate_of(engine).known["other-unknown"].state == "failed"


def test_all_are_tried_behind_one_that_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1)
    write_adapter(tmp_path / "good", model)
    load(engine, "bad", tmp_path / "unknown")
    load(engine, "good", tmp_path / "good")
    engine.make_ready()
    assert [known.state for known in gate_of(engine).known.values()] == ["failed", "ready"]


def test_one_that_kills_workers_is_tried_alone_and_then_refused(checkpoint: Make, tmp_path: Path) -> None:
    """Even if nobody asks for it: whoever has loaded it is told."""
    engine = Engine(checkpoint("llama")[0], cpu_kernels="native")
    scheduler, gate = engine.scheduler, gate_of(engine)
    load(engine, "bad", tmp_path / "bad")
    for _ in range(2):
        assert gate.known["bad"].state == "loading"
        orders = scheduler.take_messages(before_plan=True)
        assert [type(order) for order in orders] == [PrepareAdapter]
        scheduler.reset_worker(engine.hello, has_died=True)
        gate = gate_of(engine)
    assert gate.known["bad"].state == "failed"
    assert "died" in gate.known["bad"].error
    assert not gate.num_in_making
    assert not [order for order in scheduler.take_messages(before_plan=True) if isinstance(order, PrepareAdapter)]
