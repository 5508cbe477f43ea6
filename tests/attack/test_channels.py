"""What a process that reaches the scheduler's sockets can do to the others: nothing, and it is counted.

Nobody else's process reaches them: they are files in a folder that is its owner's alone, or have keys.
"""

import pickle
import random
import socket
import struct
import threading
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    FrontendHello,
    Heartbeat,
    Message,
    PauseRequest,
    SamplingParams,
    SequenceProgress,
    StepResult,
    WorkerFailed,
    WorkerHello,
)
from tests.attack.after_check import CANARY, Victim
from tests.faults.soak import sized

FINE = SamplingParams(max_tokens=4)
TOKENS = struct.pack("<2i", 5, 6)


def garbage(count: int) -> list[bytes]:
    """Frames of many kinds: pickles, foreign types, wrong tags and arities, claims of 2 GB, nesting, noise."""
    draw = random.Random(0)
    kinds = [
        pickle.dumps({"a": 1}),
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode(["AddRequest", 1]),
        msgspec.msgpack.encode(["Heartbeat", *range(1000)])[:-1],
        msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x")),
        msgspec.msgpack.encode({"type": "Heartbeat"}),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\x7f\xff\xff\xff",
        b"\x91" * 100_000,
        b"",
    ]
    return [*kinds, *(b"\xc1" + draw.randbytes(draw.randrange(64)) for _ in range(count - len(kinds)))]


def absurd() -> list[Message]:
    """Messages of the right shape from somebody who has not said hello."""
    return [
        StepResult(1 << 60, TOKENS),
        WorkerFailed(1 << 60, "x" * 100_000),
        AbortRequest("nobody", 1 << 60),
        PauseRequest("nobody"),
        AddRequest("x", TOKENS, FINE),
        AddRequest("x", b"\x01", FINE, progress=(SequenceProgress(1 << 40, b"\x01"),)),
        AddRequest("x", TOKENS * 100_000, FINE),
        Heartbeat(),
    ]


def flood(address: str, frames: list[bytes]) -> None:
    """A stranger who connects, sends all of it, reads nothing and leaves when it is gone."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 20_000)
        sender.connect(address)
        for frame in frames:
            sender.send(frame)
        sender.send_multipart([b"one", b"two", b"three"])


def sockets_of(server: Victim) -> dict[str, Path]:
    """The scheduler's two, by whom they are for."""
    found = {path.stem: path for path in server.runtime.iterdir() if path.is_socket()}
    assert set(found) == {"frontends", "workers"}
    return found


def dropped(server: Victim) -> Counter[str]:
    """What /metrics says was dropped, by whom the socket is for."""
    prefix = 'penstock_engine_dropped_messages_total{socket="'
    lines = [line.removeprefix(prefix) for line in server.get("/metrics").splitlines() if line.startswith(prefix)]
    return Counter({line.split('"')[0]: int(float(line.split()[-1])) for line in lines})


def test_g1_one_port_is_open(server: Victim) -> None:
    ours = {process.pid for process in psutil.Process(server.process.pid).children(recursive=True)}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert {connection.laddr.port for connection in listening} == {server.port}


def test_g2_sockets_are_private(server: Victim) -> None:
    assert server.runtime.stat().st_mode & 0o077 == 0
    assert sockets_of(server)


@pytest.mark.timeout(600)
def test_g3_garbage_is_dropped_and_counted_while_streams_go_on(server: Victim) -> None:
    before = dropped(server)
    count = sized(5_000, 1_000_000)
    frames = [*garbage(count), *map(msgspec.msgpack.encode, absurd())]
    threads = [threading.Thread(target=flood, args=(f"ipc://{path}", frames)) for path in sockets_of(server).values()]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.post("/v1/completions", CANARY) == server.canary
    expected = {name: before[name] + len(frames) + 1 for name in sockets_of(server)}
    server.wait_until(lambda: dropped(server) == {**expected, "worker": 0})


def test_g3_bytes_that_are_no_protocol_at_all(server: Victim) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZMTP 3.0
    endless = b"\x02" + struct.pack(">Q", 1 << 62)  # a frame of 2**62 bytes
    for path in sockets_of(server).values():
        for content in (b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 16), greeting + endless, greeting + b"\x04\x05READY"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                try:
                    raw.sendall(content)
                except ConnectionError:
                    continue  # it was hung up on in the middle


def test_g4_a_false_frontend_gets_refusals_and_meddles_with_nobody(server: Victim) -> None:
    """It knows the protocol and the model, and asks for what cannot be computed."""
    bad = [
        AddRequest("x", b"\x01", FINE),
        AddRequest("x", struct.pack("<1i", -1), FINE),
        AddRequest("x", struct.pack("<1i", 2**31 - 1), FINE),
        AddRequest("x", TOKENS * 100_000, FINE),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, top_p=float("nan"))),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, logit_bias=((1 << 40, 1.0),))),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, bad_words=((1 << 40,),))),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, allowed_token_ids=(-5,))),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, min_tokens=2, stop_token_ids=(1 << 40,))),
        AddRequest("x", TOKENS, msgspec.structs.replace(FINE, grammar="no grammar")),
        AddRequest("x", TOKENS, FINE, progress=(SequenceProgress(1 << 40, b"\x01"),)),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.RCVTIMEO, 10_000)
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"ipc://{sockets_of(server)['frontends']}")
        sender.send(msgspec.msgpack.encode(FrontendHello(PROTOCOL_VERSION, "false", server.fingerprint)))
        assert b"EngineReady" in sender.recv()
        for message in bad:
            sender.send(msgspec.msgpack.encode(message))
            while b"TokenBatch" not in (said := sender.recv()):
                pass
            assert b"error" in said
            assert server.post("/v1/completions", CANARY) == server.canary
        sender.send(msgspec.msgpack.encode(["Goodbye"]))
        server.wait_until(lambda: server.post("/v1/completions", CANARY) == server.canary)


def test_g4_a_second_worker_is_refused(server: Victim) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.RCVTIMEO, 10_000)
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"ipc://{sockets_of(server)['workers']}")
        hello = WorkerHello(PROTOCOL_VERSION, "false", 0, server.fingerprint, "cpu", "float32", 100, 64, 4, 64, 8, 32)
        sender.send(msgspec.msgpack.encode(hello))
        assert b"another worker is already serving" in sender.recv()


@pytest.mark.timeout(600)
def test_g5_who_never_reads_holds_up_nobody(server: Victim) -> None:
    """More answers wait for it than its queue may hold."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.RCVHWM, 1)
        sender.connect(f"ipc://{sockets_of(server)['frontends']}")
        sender.send(msgspec.msgpack.encode(FrontendHello(PROTOCOL_VERSION, "deaf", server.fingerprint)))
        refused = msgspec.msgpack.encode(AddRequest("x", b"\x01", FINE, n=8))
        for _ in range(30):
            for _ in range(1000):
                sender.send(refused)
            assert server.post("/v1/completions", CANARY) == server.canary
