"""Section G: what a process that reaches the internal sockets can do."""

import pickle
import random
import struct
import threading
from typing import Any

import msgspec
import psutil
import zmq

from penstock.ipc.messages import AbortRequest, AddRequest, ResumedSequence, SamplingParams, StepResult
from tests.attack.after_check import CANARY, Victim
from tests.faults.soak import sized


def frames(count: int) -> list[bytes]:
    """Garbage of many kinds: pickles, foreign types, wrong tags and arities, claims of 2 GB, nesting, noise."""
    draw = random.Random(0)
    kinds = [
        pickle.dumps({"a": 1}),
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode(["AddRequest", 1]),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x")),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xc6\x7f\xff\xff\xff",
        b"",
    ]
    return [*kinds, *(draw.randbytes(draw.randrange(1, 64)) for _ in range(count - len(kinds)))]


def absurd() -> list[Any]:
    """Messages of the right shape that ask for what cannot be."""
    fine = SamplingParams(max_tokens=4)
    tokens = struct.pack("<2i", 5, 6)
    return [
        StepResult(1 << 60, tokens),
        AbortRequest("nobody", 1 << 60),
        AddRequest("x", b"\x01", fine),
        AddRequest("x", struct.pack("<1i", -1), fine),
        AddRequest("x", struct.pack("<1i", 2**31 - 1), fine),
        AddRequest("x", tokens, fine, resume=(ResumedSequence(1 << 40, b"\x01"),)),
        AddRequest("x", tokens * 100_000, fine),
    ]


def flood(address: str, count: int) -> None:
    """A stranger who connects, sends all of it and leaves."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.SNDTIMEO, 5000)
        socket.connect(address)
        for frame in [*frames(count), *map(msgspec.msgpack.encode, absurd())]:
            socket.send(frame)
        socket.send_multipart([b"one", b"two", b"three"])


def test_g1_one_port_is_open(server: Victim) -> None:
    ours = {process.pid for process in psutil.Process(server.process.pid).children(recursive=True)}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert {connection.laddr.port for connection in listening} == {server.port}


def test_g2_sockets_are_private(server: Victim) -> None:
    assert server.runtime.stat().st_mode & 0o077 == 0
    assert any(path.is_socket() for path in server.runtime.iterdir())


def test_g3_g4_garbage_and_absurd_messages(server: Victim) -> None:
    sockets = [path for path in server.runtime.iterdir() if path.is_socket()]
    assert len(sockets) == 2
    threads = [threading.Thread(target=flood, args=(f"ipc://{path}", sized(5_000, 1_000_000))) for path in sockets]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.post("/v1/completions", CANARY) == server.canary
    for thread in threads:
        thread.join()
