"""Copies beside a GPU that is busy: what is only right if streams wait for each other, and memory lives long enough."""

from functools import partial

import numpy as np
import pytest
import torch

from penstock.gpu_worker.devices.cuda import CudaDevice
from penstock.gpu_worker.state import transfers
from penstock.gpu_worker.state.transfers import DirectTransfers, StagedTransfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

_MILLISECOND = 2_000_000  # cycles, about


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0)


def busy(milliseconds: float) -> None:
    """Let the current stream wait."""
    torch.cuda._sleep(int(milliseconds * _MILLISECOND))


def test_uploads_are_copied_before_their_memory_is_used_again(device: CudaDevice) -> None:
    """Pinned memory of the same size, given back at once, while the copies wait behind other work."""
    target = torch.zeros(50, 257, dtype=torch.int32, device=device.torch_device)
    for _ in range(3):
        busy(20)
        kept = []
        for i in range(50):
            kept.append(device.upload(np.full(257, i, dtype=np.int32)))
            device.upload_into(np.full(257, 1000 + i, dtype=np.int32), target[i])
        for i, tensor in enumerate(kept):
            assert tensor.tolist() == [i] * 257
        assert torch.equal(target[:, 0].cpu(), 1000 + torch.arange(50, dtype=torch.int32))


def test_downloads_are_of_their_moment(device: CudaDevice) -> None:
    """The results' stream is late: by then, the tensor is gone, and the steps have written to its memory."""
    downloads = []
    for i in range(20):
        busy(1)
        tensor = torch.full((1000,), i, dtype=torch.int32, device=device.torch_device)
        with torch.cuda.stream(device._results):
            busy(3)
        downloads.append(device.download(tensor))
        del tensor
        for _ in range(4):
            torch.full((1000,), -1, dtype=torch.int32, device=device.torch_device)
    assert not downloads[-1].is_ready()
    for i, download in enumerate(downloads):
        assert np.frombuffer(download.wait(), dtype=np.int32).tolist() == [i] * 1000
        assert download.is_ready()


@pytest.mark.parametrize("late", ["steps", "copies", "neither"])
def test_pages_move_in_the_order_of_the_plans(device: CudaDevice, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Steps that write to pages between copies of them, with slots of three pages, and one of the lanes behind."""
    parts, pages, host_pages, elements = 3, 12, 9, 40
    monkeypatch.setattr(transfers, "_SLOT_BYTES", 3 * parts * elements * 4)
    shape = (parts, pages, elements)
    blocks = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)
    host = device.host_memory((host_pages, parts, elements), torch.int32)
    lanes = device.lanes()
    assert lanes is not None
    staged = StagedTransfers(blocks, host, *lanes, device.upload)
    expected, expected_host = torch.zeros(shape, dtype=torch.int32), torch.zeros_like(host)
    direct = DirectTransfers(expected, expected_host)
    random = np.random.default_rng(0)
    for step in range(60):
        if late == "steps":
            busy(0.5)
        elif late == "copies":
            lanes[1].run(partial(busy, 0.5))
        written = random.choice(pages, 4, replace=False)
        for its in (blocks, expected):
            its[:, torch.from_numpy(written).to(its.device)] = step + 1
        count = int(random.integers(1, 8))
        on_device = random.choice(pages, count, replace=False).astype(np.int32)
        on_host = random.choice(host_pages, count, replace=False).astype(np.int32)
        for each in (staged, direct):
            if step % 3 == 1:
                each.from_host(on_host, on_device)
            else:
                each.to_host(on_device, on_host)
        blocks[:, int(on_device[0])] += 1  # a page may be written to as soon as its copy was begun
        expected[:, int(on_device[0])] += 1
    staged.mark().wait()
    torch.cuda.synchronize()
    assert torch.equal(blocks.cpu(), expected)
    assert torch.equal(host, expected_host)
    num_pages, num_us = staged.take_times()
    assert num_pages == direct.take_times()[0]
    assert num_us > 0


def test_pinned_memory_can_be_had_again(device: CudaDevice) -> None:
    """The system gives out the same addresses again: each time, the driver must have forgotten the memory before."""
    for i in range(5):
        memory = device.host_memory((4, 1 << 20), torch.int32)
        there = torch.full((1 << 20,), i, dtype=torch.int32, device=device.torch_device)
        memory[3].copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert int(memory[3].min()) == int(memory[3].max()) == i
        del memory


def test_a_graph_reads_what_is_uploaded_between_replays(device: CudaDevice) -> None:
    """Replays follow each other without the host waiting: each has its own input, and results of its own moment."""
    given = torch.zeros(8, dtype=torch.int32, device=device.torch_device)

    def step() -> torch.Tensor:
        busy(1)
        return given * 3 + torch.arange(8, dtype=torch.int32, device=device.torch_device)

    replay, made = device.capture(step)
    downloads = []
    for i in range(10):
        device.upload_into(np.full(8, i, dtype=np.int32), given)
        replay()
        downloads.append(device.download(made.clone()))
    for i, download in enumerate(downloads):
        assert np.frombuffer(download.wait(), dtype=np.int32).tolist() == [3 * i + j for j in range(8)]
