"""tcp:// channels with keys: closed to everyone without them, and nothing of them can be read on the way."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from penstock.ipc.channel import Dealer, PeerId, Router
from penstock.ipc.codec import Codec
from penstock.ipc.curve import Doorkeeper, make_key_file
from penstock.ipc.key_file import ChannelKeys, KeyFileError, read_key_file
from penstock.ipc.messages import AbortRequest, FromFrontend, Heartbeat, ToFrontend

Context = zmq.Context[zmq.Socket[bytes]]
SECRET_TEXT = "a-request-id-that-nobody-else-may-read"


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def new_keys(path: Path) -> ChannelKeys:
    make_key_file(path)
    return read_key_file(path)


@contextlib.asynccontextmanager
async def listening(context: Context, keys: ChannelKeys) -> AsyncIterator[tuple[str, asyncio.Queue[FromFrontend]]]:
    """A router that answers each message; its address, and what it heard."""
    heard: asyncio.Queue[FromFrontend] = asyncio.Queue()
    doorkeeper = Doorkeeper(context, keys)

    def on_message(peer: PeerId, message: FromFrontend) -> None:
        heard.put_nowait(message)
        router.send(peer, Heartbeat())

    router: Router[FromFrontend] = Router(context, "tcp://127.0.0.1:*", Codec(FromFrontend), on_message, keys=keys)
    yield router.address, heard
    router.close()
    doorkeeper.close()


async def test_who_has_the_keys_is_heard_and_answered_and_nobody_else(context: Context, tmp_path: Path) -> None:
    keys, others = new_keys(tmp_path / "ours"), new_keys(tmp_path / "theirs")
    halves = ChannelKeys(others.public, others.secret)
    async with listening(context, keys) as (address, heard):
        answers: asyncio.Queue[ToFrontend] = asyncio.Queue()
        strangers: list[Dealer[ToFrontend]] = []
        for number, theirs in enumerate((None, others)):
            stranger: Dealer[ToFrontend] = Dealer(
                context, address, f"s{number}", Codec(ToFrontend), answers.put_nowait, theirs
            )
            stranger.send(AbortRequest("intruder"))
            strangers.append(stranger)
        # Knows the listener's public key, but not the secret that belongs to it.
        raw: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.curve_publickey, raw.curve_secretkey = halves
        raw.curve_serverkey = keys.public
        raw.connect(address)
        with contextlib.suppress(zmq.Again):  # where it has been turned away already
            raw.send(Codec(ToFrontend).encode(AbortRequest("intruder")), zmq.NOBLOCK)
        await asyncio.sleep(0.5)
        ours: Dealer[ToFrontend] = Dealer(context, address, "f", Codec(ToFrontend), answers.put_nowait, keys)
        ours.send(AbortRequest("wanted"))
        assert await asyncio.wait_for(heard.get(), 60) == AbortRequest("wanted")
        assert await asyncio.wait_for(answers.get(), 60) == Heartbeat()
        assert heard.empty()
        raw.close()
        for stranger in (*strangers, ours):
            stranger.close()


async def test_nothing_can_be_read_on_the_way(context: Context, tmp_path: Path) -> None:
    keys = new_keys(tmp_path / "keys")
    passed = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # who leaves with bytes unread resets the connection
            while chunk := await reader.read(1 << 16):
                passed.extend(chunk)
                writer.write(chunk)
        writer.close()

    async with listening(context, keys) as (address, heard):

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
            await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))
            await asyncio.gather(onward[1].wait_closed(), writer.wait_closed(), return_exceptions=True)
            ended.set()

        ended = asyncio.Event()
        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            dealer: Dealer[ToFrontend] = Dealer(
                context, f"tcp://127.0.0.1:{port}", "f", Codec(ToFrontend), lambda _: None, keys
            )
            dealer.send(AbortRequest(SECRET_TEXT))
            assert await asyncio.wait_for(heard.get(), 60) == AbortRequest(SECRET_TEXT)
            dealer.close()
            await asyncio.wait_for(ended.wait(), 60)
    assert len(passed) > 200
    assert SECRET_TEXT.encode() not in passed


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_key_file(path)
    content = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_key_file(path)
    assert path.read_text() == content
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize("content", ["", "public = 1", "public = 'short'\nsecret = 'short'", "no toml", "\x00"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="keys"):
        read_key_file(path)
