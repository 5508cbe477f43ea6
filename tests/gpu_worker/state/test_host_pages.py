"""Pages of the host: copies count as done in the order of the plan, also where they are done beside the steps."""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.device import Lane, Mark
from penstock.gpu_worker.state.host_pages import HostPages, NoHostMemoryError, independent_runs
from penstock.gpu_worker.state.kv_pool import KVPool, PageGroup
from penstock.gpu_worker.state.transfers import StagedTransfers
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import FROM_HOST, ON_DEVICE, TO_HOST, StepPlan

NUM_PAGES, NUM_HOST_PAGES = 6, 5


def small_pool() -> KVPool:
    """Two layers; every page has other numbers."""
    pool = KVPool((PageGroup((0, 1), 4, 2, 8),), NUM_PAGES, torch.float32, torch.device("cpu"))
    pool.blocks.copy_(torch.randn(pool.blocks.shape, generator=torch.Generator().manual_seed(0)))
    return pool


class Done:
    """A point in a lane that is passed once the lane has come there."""

    def __init__(self) -> None:
        self.passed = False

    def us_since(self, earlier: Mark) -> int:
        return 5

    def is_passed(self) -> bool:
        return self.passed

    def wait(self) -> None:
        assert self.passed


class LateLane:
    """Does nothing before it is told to, like a stream of a GPU."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None] | Done | tuple[Done]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self._due.append(work)

    def mark(self) -> Done:
        self._due.append(done := Done())
        return done

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, Done)
        self._due.append((mark,))

    def advance(self) -> bool:
        """Do the next thing; False if there is none, or it has to wait."""
        if not self._due or (isinstance(self._due[0], tuple) and not self._due[0][0].passed):
            return False
        match self._due.popleft():
            case Done() as done:
                done.passed = True
            case tuple():
                pass
            case work:
                work()
        return True

    @property
    def is_done(self) -> bool:
        return not self._due


class LateDevice(CpuDevice):
    """Two lanes that advance in any order."""

    def __init__(self) -> None:
        super().__init__(1)
        self.steps, self.copies = LateLane(), LateLane()

    def lanes(self) -> tuple[Lane, Lane]:
        return self.steps, self.copies

    def advance(self, rng: Random) -> bool:
        lanes = [self.steps, self.copies]
        rng.shuffle(lanes)
        return lanes[0].advance() or lanes[1].advance()


def plan_of(copies: list[tuple[int, int, int]]) -> StepPlan:
    """Of (source, target, kind)."""
    src, dst, tiers = zip(*copies, strict=True) if copies else ((), (), ())
    none = b""
    return StepPlan(
        0, none, none, none, none, copy_src=pack_int32(src), copy_dst=pack_int32(dst), copy_tiers=bytes(tiers)
    )


def random_copies(rng: Random) -> list[tuple[int, int, int]]:
    copies = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.choice([ON_DEVICE, TO_HOST, TO_HOST, FROM_HOST, FROM_HOST])
        src = rng.randrange(NUM_HOST_PAGES if kind == FROM_HOST else NUM_PAGES)
        dst = rng.randrange(NUM_HOST_PAGES if kind == TO_HOST else NUM_PAGES)
        if kind != ON_DEVICE or src != dst:
            copies.append((src, dst, kind))
    return copies


def apply_one_by_one(copies: list[tuple[int, int, int]], blocks: Tensor, host: Tensor) -> None:
    for src, dst, kind in copies:
        page = host[src].clone() if kind == FROM_HOST else blocks[:, src].clone()
        if kind == TO_HOST:
            host[dst] = page
        else:
            blocks[:, dst] = page


def test_copies_are_done_in_order() -> None:
    rng = Random(0)
    pool = small_pool()
    host = HostPages(pool, NUM_HOST_PAGES, CpuDevice(1))
    blocks, memory = pool.blocks.clone(), host.memory.clone()
    for _ in range(200):
        copies = random_copies(rng)
        host.copy(plan_of(copies))
        apply_one_by_one(copies, blocks, memory)
        assert torch.equal(pool.blocks, blocks)
        assert torch.equal(host.memory, memory)
        num_pages, _ = host.take_times()
        assert num_pages == sum(kind != ON_DEVICE for _, _, kind in copies)


@pytest.mark.parametrize("seed", range(30))
def test_copies_beside_steps_are_done_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps write to pages between the plans' copies; the lanes advance as chance has it."""
    monkeypatch.setattr("penstock.gpu_worker.state.transfers._SLOT_BYTES", 2 * small_pool().blocks[:, 0].nbytes)
    rng = Random(seed)
    pool, device = small_pool(), LateDevice()
    host = HostPages(pool, NUM_HOST_PAGES, device)
    assert isinstance(host.transfers, StagedTransfers)
    # What is not a transfer runs in the lane of steps, too.
    monkeypatch.setattr(pool, "copy_pages", in_lane(device.steps, pool.copy_pages))
    blocks, memory = pool.blocks.clone(), host.memory.clone()
    num_pages = 0
    for i in range(20):
        copies = random_copies(rng)
        host.copy(plan_of(copies))
        apply_one_by_one(copies, blocks, memory)
        page = rng.randrange(NUM_PAGES)
        device.steps.run(partial(write, pool, page, i))
        blocks[:, page] = i
        num_pages += sum(kind != ON_DEVICE for _, _, kind in copies)
        for _ in range(rng.randrange(30)):
            device.advance(rng)
    mark = host.mark()
    while device.advance(rng):
        pass
    assert device.steps.is_done
    assert device.copies.is_done
    assert mark.is_passed()
    assert torch.equal(host.memory, memory)
    assert torch.equal(pool.blocks, blocks)
    assert host.take_times()[0] == num_pages
    assert host.take_times() == (0, 0)


def write(pool: KVPool, page: int, number: int) -> None:
    pool.blocks[:, page] = number


def in_lane(lane: LateLane, work: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    return lambda src, dst: lane.run(lambda: work(src, dst))


def test_a_copy_to_the_host_does_not_hold_up_steps() -> None:
    """The page may be written to while what it held is still on its way."""
    pool, device = small_pool(), LateDevice()
    host = HostPages(pool, NUM_HOST_PAGES, device)
    expected = pool.blocks[:, 1].clone()
    host.copy(plan_of([(1, 3, TO_HOST)]))
    device.steps.run(partial(write, pool, 1, 0))
    while device.steps.advance():
        pass
    assert device.steps.is_done
    assert not pool.blocks[:, 1].any()
    while device.copies.advance():
        pass
    assert torch.equal(host.memory[3], expected)


def test_runs_are_independent() -> None:
    rng = Random(1)
    for _ in range(300):
        copies = random_copies(rng)
        src, dst, kinds = (list(column) for column in zip(*copies, strict=True)) if copies else ([], [], [])
        runs = list(independent_runs(src, dst, kinds))
        assert [i for begin, end in runs for i in range(begin, end)] == list(range(len(copies)))
        for begin, end in runs:
            assert len(set(kinds[begin:end])) == 1
            assert len(set(dst[begin:end])) == end - begin
            assert kinds[begin] != ON_DEVICE or not set(dst[begin:end]) & set(src[begin:end])


def test_a_lower_tier_reads_and_writes_whole_pages() -> None:
    pool = small_pool()
    host = HostPages(pool, NUM_HOST_PAGES, CpuDevice(1))
    host.copy(plan_of([(2, 0, TO_HOST)]))
    page = memoryview(bytearray(host.page_bytes))
    host.read_page(0, page)
    host.write_page(4, page)
    host.copy(plan_of([(4, 5, FROM_HOST)]))
    assert torch.equal(pool.blocks[:, 5], pool.blocks[:, 2])


def test_the_speed_is_measured_without_a_trace() -> None:
    pool = small_pool()
    before = pool.blocks.clone()
    host = HostPages(pool, NUM_HOST_PAGES, CpuDevice(1))
    assert host.copy_speed() > 0
    assert host.take_times() == (0, 0)
    assert torch.equal(pool.blocks, before)


class Full(CpuDevice):
    """Has less memory than it says."""

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise RuntimeError("cannot pin\nmore")


def test_without_the_memory_there_is_no_tier() -> None:
    pool = small_pool()
    with pytest.raises(NoHostMemoryError, match=r"cannot pin$"):
        HostPages(pool, 3, Full(1))
    with pytest.raises(NoHostMemoryError, match="asks for"):
        HostPages(pool, 1 << 50, CpuDevice(1))
    with pytest.raises(NoHostMemoryError, match="no page fits"):
        HostPages.within(10, pool, CpuDevice(1))
    page_bytes = HostPages.within(10_000, pool, CpuDevice(1)).page_bytes
    assert HostPages.within(10_000, pool, CpuDevice(1)).num_pages == 10_000 // page_bytes
    assert np.prod(pool.blocks[:, 0].shape) * 4 == page_bytes
