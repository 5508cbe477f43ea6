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
from penstock.gpu_worker.models.model import ForwardInputs, Model
from penstock.ipc.messages import SamplingParams
from penstock.kernels.activation import Activation
from penstock.models.weights.sources import WHOLE
from penstock.parts.adapters.keys import key_of
from penstock.parts.adapters.messages import PrepareAdapter
from penstock.parts.adapters.worker.files import AdapterError
from penstock.parts.adapters.worker.rows import AdapterRows
from penstock.parts.adapters.worker.store import AdapterStore
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine, make_config
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
        its = write_adapter(folder / f"{number}", model, seed=number)
        merged[load(engine, f"a{number}", folder / f"{number}")] = its
        engine.make_ready()
        rmtree(folder / f"{number}")
    return engine, merged


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_files_are_read_once(checkpoint: Make, tmp_path: Path, kernels: str) -> None:
    engine, merged = with_three(checkpoint, tmp_path, cpu_kernels=kernels)
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    for (prompt, key), output in zip(asks, run(engine, asks), strict=True):
        assert_greedy(merged[key], prompt, output)


def test_the_host_keeps_so_many(checkpoint: Make, tmp_path: Path) -> None:
    engine, merged = with_three(checkpoint, tmp_path, cpu_kernels="native", max_cpu_loras=1)
    first, _, last = merged
    [output] = run(engine, [(PROMPTS[0], last)])
    assert_greedy(merged[last], PROMPTS[0], output)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=1), adapter=first)
    deltas = [delta for _ in range(2) for delta in engine.step().deltas]
    assert "cannot read" in next(delta.error for delta in deltas if delta.error)


def test_the_host_keeps_so_many_bytes(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    rows = rows_of(Engine(folder, cpu_kernels="native"))
    write_adapter(tmp_path / "a", model)
    write_adapter(tmp_path / "b", model)
    its = rows._store
    a, b = (key_of(name, str(tmp_path / name)) for name in "ab")
    num_bytes = its.find(a, tmp_path / "a").made.num_bytes
    small = AdapterStore(rows._adapters, its._fitting, its._dtype, max_num=9, max_bytes=num_bytes)
    first = small.find(a, tmp_path / "a")
    assert small.find(a, tmp_path / "a") is first
    small.find(b, tmp_path / "b")
    assert small.find(a, tmp_path / "a") is not first  # b has taken its place
    small.forget(a)
    rmtree(tmp_path / "a")
    with pytest.raises(AdapterError, match="cannot read"):
        small.find(a, tmp_path / "a")


def test_files_that_change_below_their_key(checkpoint: Make, tmp_path: Path) -> None:
    """What was read stays; what must be read again is not taken for it. Loaded again, it is another one."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1, max_cpu_loras=1, enable_prefix_caching=True)
    [prompt] = prompts((50,), seed=9)
    first = write_adapter(tmp_path / "a", model)
    old = load(engine, "a", tmp_path / "a")
    assert_greedy(first, prompt, run(engine, [(prompt, old)])[0])
    second = write_adapter(tmp_path / "a", model, seed=7)
    assert_greedy(first, prompt, run(engine, [(prompt, old)])[0])
    new = load(engine, "a", tmp_path / "a")
    assert_greedy(second, prompt, run(engine, [(prompt, new)])[0])  # and not by the first one's pages
    engine.add(prompt, SamplingParams(max_tokens=1), adapter=old)
    errors = [delta.error for _ in range(2) for delta in engine.step().deltas if delta.error]
    assert errors == ["the adapter cannot be used: its files have changed since it was loaded: load it again"]


def test_one_that_is_forgotten_while_it_is_read(checkpoint: Make, tmp_path: Path, monkeypatch: Any) -> None:
    folder, model = checkpoint("llama")
    rows = rows_of(Engine(folder, cpu_kernels="native"))
    write_adapter(tmp_path / "a", model)
    its = rows._store
    made, key = rows._adapters.made, key_of("a", str(tmp_path / "a"))

    def forgotten(factors: Any) -> Any:
        its.forget(key)
        return made(factors)

    monkeypatch.setattr(rows._adapters, "made", forgotten)
    first = its.find(key, tmp_path / "a")
    assert its.find(key, tmp_path / "a") is not first  # it was not kept


def test_one_that_is_unloaded_while_it_is_read(checkpoint: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing waits for it for ever, and its slot is free."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1)
    merged = write_adapter(tmp_path / "a", model)
    may_read = threading.Event()
    monkeypatch.setattr(rows_of(engine), "_before", may_read.wait)
    gate = gate_of(engine)
    key = load(engine, "a", tmp_path / "a")
    engine._order(before_plan=True)
    gate.unload(key)
    gate.forget(set())
    engine._order(before_plan=True)
    may_read.set()
    for _ in range(100):
        engine._exchange([], seconds=0.1)
        if not gate.num_in_making:
            break
    assert gate.num_in_making == 0
    key = load(engine, "a", tmp_path / "a")
    [output] = run(engine, [(PROMPTS[0], key)])
    assert_greedy(merged, PROMPTS[0], output)


def test_the_pool_leaves_room_for_those_that_options_name(checkpoint: Make, tmp_path: Path) -> None:
    """The largest ones, as many as are in memory at a time."""
    folder, model = checkpoint("llama")
    sizes = []
    for rank in (2, 4, 8):
        write_adapter(tmp_path / f"{rank}", model, rank)
        sizes.append((tmp_path / f"{rank}/adapter_model.safetensors").stat().st_size)
    named = tuple(f"{rank}={tmp_path / str(rank)}" for rank in (2, 4, 8))
    for most in (1, 2, 32):
        config = make_config(folder, lora=named, max_loras=most)
        assert AdapterRows.device_bytes(config, cast(Model, None)) == sum(sizes[-most:])


def test_the_largest_rank(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_lora_rank=4)
    for rank in (4, 5):
        write_adapter(tmp_path / f"{rank}", model, rank)
    served, refused = (load(engine, f"{rank}", tmp_path / f"{rank}") for rank in (4, 5))
    engine.make_ready()
    assert gate_of(engine).known[served].state == "ready"
    assert "is 5, more than --max-lora-rank 4" in gate_of(engine).known[refused].error


def test_ranks_of_peft(checkpoint: Make, tmp_path: Path) -> None:
    """The largest that are served from the start."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native")
    merged = write_adapter(tmp_path / "one", model, 256, ("q_proj", "down_proj"))
    key = load(engine, "one", tmp_path / "one")
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, key) for prompt in PROMPTS]), strict=True):
        assert_greedy(merged, prompt, output)


def test_a_product_that_computes_the_activation_itself() -> None:
    """It still does, whether or not some rows add something: so the bits of the others stay."""
    adapters, device = Adapters(), CpuDevice(1)
    product = adapters.add_site(cast(Linear, _Fused()), Site((SitePart("m", 3, 2, WHOLE),), None))
    adapters.prepare(num_slots=1, num_rows=2, max_rank=1, dtype=torch.float32, device=device)
    x, step = torch.randn(2, 4), cast(ForwardInputs, None)
    alone = product.of_activation(x, SILU, step)
    assert alone.eq(7).all()
    adapters.put(0, adapters.made({"m": Factors(torch.ones(1, 2), torch.ones(3, 1))}))
    adapters.give([(1, 0)])
    adapters.begin(np.array([0, 1]), np.array([1, 1]))
    both = product.of_activation(x, SILU, step)
    assert both[0].equal(alone[0])
    torch.testing.assert_close(both[1], alone[1] + SILU(x)[1].sum())


def test_who_waits_for_room_gets_it_from_one_that_nobody_asked_for(checkpoint: Make, tmp_path: Path) -> None:
    """Be it read, or refused."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", max_loras=1)
    merged = write_adapter(tmp_path / "good", model)
    key = load(engine, "good", tmp_path / "good")
    for other in ("unknown", "good"):  # the first one is refused
        load(engine, f"other-{other}", tmp_path / other)
        ids = [engine.add(prompt, SamplingParams(max_tokens=12, temperature=0.0), adapter=key) for prompt in PROMPTS]
        for _ in range(200):
            for delta in engine.step().deltas:
                engine._take(delta)
        assert not engine.has_work
        for prompt, request_id in zip(PROMPTS, ids, strict=True):
            assert_greedy(merged, prompt, engine.outputs[request_id, 0])
    assert gate_of(engine).known["other-unknown@none"].state == "failed"


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
    key = load(engine, "bad", tmp_path / "bad")
    for _ in range(2):
        assert gate.known[key].state == "loading"
        orders = scheduler.take_messages(before_plan=True)
        assert [type(order) for order in orders] == [PrepareAdapter]
        scheduler.reset_worker(engine.hello, has_died=True)
        gate = gate_of(engine)
    assert gate.known[key].state == "failed"
    assert "died" in gate.known[key].error
    assert not gate.num_in_making
    assert not [order for order in scheduler.take_messages(before_plan=True) if isinstance(order, PrepareAdapter)]
