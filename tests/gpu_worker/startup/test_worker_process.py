"""The worker as a process, over a real socket, with the scheduler's side played by the test."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from penstock.config import Config, IpcOptions
from penstock.config.parts import with_parts
from penstock.ipc import process, sockets
from penstock.ipc.codec import Codec
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    FromWorker,
    Heartbeat,
    Message,
    NewRow,
    Refused,
    SamplingParams,
    SayHello,
    StepPlan,
    StepResult,
    Welcome,
    WorkerFailed,
    WorkerHello,
)
from tests.faults.soak import only_in_soak
from tests.gpu_worker.checkpoints import edit_config, make_checkpoint
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import make_config

PROMPT = [5, 6, 7, 8, 9]


def int32(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def first_plan(step_id: int, row: int = 0) -> StepPlan:
    new = NewRow(row, int32(*PROMPT), len(PROMPT), SamplingParams(max_tokens=8, temperature=0.0), int32(3))
    return StepPlan(step_id, int32(row), int32(0), int32(len(PROMPT)), b"\x01", (new,))


def decode_plan(step_id: int, position: int, row: int = 0) -> StepPlan:
    return StepPlan(step_id, int32(row), int32(position), int32(1), b"\x01")


_WORKER = ("-m", "penstock.gpu_worker")


class Peer:
    """The scheduler's socket, and the process that connects to it."""

    def __init__(
        self,
        folder: Path,
        run_dir: Path,
        heartbeat_timeout: float = 10.0,
        program: tuple[str, ...] = _WORKER,
        **options: Any,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{run_dir}/w"
        self.socket = sockets.router(self._context, address)
        self._codec: Codec[Any] = Codec(with_parts(FromWorker, "FROM_WORKER"))
        self._worker = b""
        config: Config = msgspec.structs.replace(
            make_config(folder, **options),
            ipc=IpcOptions(worker_address=address, max_heartbeat_interval=0.05, heartbeat_timeout=heartbeat_timeout),
        )
        descriptor = process.pass_config(config)
        ready_read, ready_write = os.pipe()
        self.ready_read = ready_read
        argv = ["--config-fd", str(descriptor), "--parent-fd", str(ready_write), "--parent", str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, *program, *argv],
            pass_fds=(descriptor, ready_write),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(descriptor)
        os.close(ready_write)

    def receive(self, *, skip_heartbeats: bool = True, timeout_ms: int = 90_000) -> Message:
        while self.socket.poll(timeout_ms):
            self._worker, frame = self.socket.recv_multipart()
            message = self._codec.decode(frame)
            if not (skip_heartbeats and isinstance(message, Heartbeat)):
                return message  # type: ignore[no-any-return]
        raise TimeoutError(self.process.poll())

    def send(self, message: Message) -> None:
        self.socket.send_multipart((self._worker, self._codec.encode(message)))

    def ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=90)
        return self.process.returncode, errors

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.ready_read)
        self.socket.close()
        self._context.term()


StartWorker = Callable[..., Peer]


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    peers = []

    def make(folder: Path, **options: Any) -> Peer:
        peers.append(Peer(folder, tmp_path, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_a_worker_s_life(checkpoint: Callable[..., Checkpoint], start_worker: StartWorker) -> None:
    folder, model = checkpoint("llama")
    peer = start_worker(folder)
    hello = peer.receive()
    assert isinstance(hello, WorkerHello)
    assert (hello.protocol_version, hello.num_pages, hello.page_size) == (PROTOCOL_VERSION, 400, 16)
    assert (hello.vocab_size, hello.max_model_len, hello.dtype) == (199, 512, "float32")
    assert set(os.read(peer.ready_read, 4096).split()) == {b"alive", b"ready"}
    title = Path(f"/proc/{peer.process.pid}/cmdline").read_text()
    assert title.startswith("penstock-worker-0")
    peer.send(SayHello())
    assert peer.receive() == hello
    peer.send(Welcome(PROTOCOL_VERSION))
    assert isinstance(peer.receive(skip_heartbeats=False), Heartbeat)
    garbage = [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", pickle.dumps(1), b"StepPlan"] * 100
    for frame in garbage:
        peer.socket.send_multipart((peer._worker, frame))
    beat: Message | None = None
    while not isinstance(beat, Heartbeat) or beat.num_dropped != len(garbage):  # they are counted, and no more
        beat = peer.receive(skip_heartbeats=False)

    expected = []
    ids = list(PROMPT)
    for _ in range(4):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(int32(ids[-1]))
    plans = [first_plan(0), *(decode_plan(i, len(PROMPT) + i - 1) for i in range(1, 4))]
    for plan in plans:  # all queued at once: decodes feed on tokens that only the worker has
        peer.send(plan)
    for i in range(4):
        result = peer.receive()
        assert isinstance(result, StepResult)
        assert (result.step_id, result.token_ids) == (i, expected[i])

    peer.send(Welcome(PROTOCOL_VERSION))  # a new scheduler: rows are free again
    peer.send(first_plan(0, row=7))
    again = peer.receive()
    assert isinstance(again, StepResult)
    assert again.token_ids == expected[0]
    peer.send(first_plan(1))
    assert isinstance(peer.receive(), StepResult)


def test_a_scheduler_that_does_not_answer_is_told_hello_again_by_the_same_peer(
    checkpoint: Callable[..., Checkpoint], start_worker: StartWorker
) -> None:
    peer = start_worker(checkpoint("llama")[0], heartbeat_timeout=0.5)
    hello, first = peer.receive(), peer._worker
    assert peer.receive() == hello
    assert peer._worker == first
    peer.send(Welcome(PROTOCOL_VERSION))
    peer.send(first_plan(0))
    assert isinstance(peer.receive(), StepResult)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(
    checkpoint: Callable[..., Checkpoint], start_worker: StartWorker, number: signal.Signals
) -> None:
    peer = start_worker(checkpoint("llama")[0])
    peer.receive()
    peer.process.send_signal(number)
    assert peer.ended()[0] == 0


@only_in_soak
def test_a_profile_is_written_when_it_ends_early(
    checkpoint: Callable[..., Checkpoint], start_worker: StartWorker, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "profiles"
    peer = start_worker(checkpoint("llama")[0], profile=str(folder), cpu_kernels="torch")
    peer.receive()
    peer.send(first_plan(0))
    for i in range(1, 24):
        peer.send(decode_plan(i, len(PROMPT) + i - 1))
    for _ in range(24):
        assert isinstance(peer.receive(), StepResult)
    peer.process.send_signal(signal.SIGTERM)
    code, errors = peer.ended()
    assert code == 0
    assert "profile written" in errors
    (trace,) = folder.iterdir()
    names = {event.get("name") for event in msgspec.json.decode(trace.read_bytes())["traceEvents"]}
    assert {"aten::linear", "ProfilerStep#21"} <= names


_STUCK = """
import sys, threading
from penstock.gpu_worker.__main__ import main
from penstock.gpu_worker.parallel.alone import Alone
from penstock.gpu_worker.steps.model_runner import ModelRunner

dropped = []
drop = ModelRunner.drop_graphs
ModelRunner.drop_graphs = lambda its: dropped.append(drop(its))
Alone.close = lambda its: not dropped
threading.Thread(target=threading.Event().wait).start()
sys.exit(main(sys.argv[1:]))
"""


def test_it_ends_even_if_it_cannot_leave_its_group(
    checkpoint: Callable[..., Checkpoint], start_worker: StartWorker
) -> None:
    """A thread is stuck, for which an ordinary exit would wait. Graphs, which hold the group, are gone by then."""
    peer = start_worker(checkpoint("llama")[0], program=("-c", _STUCK))
    peer.receive()
    peer.process.send_signal(signal.SIGTERM)
    code, errors = peer.ended()
    assert code == 0
    assert "group not left in time" in errors


def test_a_refusal_ends_it(checkpoint: Callable[..., Checkpoint], start_worker: StartWorker) -> None:
    peer = start_worker(checkpoint("llama")[0])
    peer.receive()
    peer.send(Refused("another worker is already serving"))
    code, errors = peer.ended()
    assert code == 2
    assert "another worker is already serving" in errors


def test_a_failing_step_is_reported(checkpoint: Callable[..., Checkpoint], start_worker: StartWorker) -> None:
    peer = start_worker(checkpoint("llama")[0])
    peer.receive()
    bad = NewRow(99, int32(*PROMPT), len(PROMPT), SamplingParams(max_tokens=8), int32(3))  # there is no row 99
    peer.send(StepPlan(5, int32(99), int32(0), int32(5), b"\x01", (bad,)))
    failed = peer.receive()
    assert isinstance(failed, WorkerFailed)
    assert failed.step_id == 5
    code, errors = peer.ended()
    assert code == 1
    assert "worker failed" in errors


def test_a_checkpoint_that_cannot_work_is_one_clear_line(tmp_path: Path, start_worker: StartWorker) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, "llama")
    edit_config(folder, architectures=["BertForMaskedLM"])
    code, errors = start_worker(folder).ended()
    assert code == 2
    lines = [line for line in errors.splitlines() if "cannot start" in line]
    assert len(lines) == 1
    assert "BertForMaskedLM" in lines[0]
    assert "Traceback" not in errors


_IMPORT = """
import torch
def touched(*_, **__):
    raise SystemExit("the device was touched")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, touched)
import penstock.gpu_worker.__main__
"""


def test_importing_touches_no_device() -> None:
    """Workers are forked off a process that has imported all of it: a device that it had opened would be lost."""
    subprocess.run([sys.executable, "-c", _IMPORT], check=True, timeout=90)
