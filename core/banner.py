"""What `penstock serve` says once requests can come: where, what, how much fits, and a line to try."""

import asyncio
import json
import sys

import structlog
import zmq

from penstock.core.config import Config
from penstock.core.config.checkpoint import fingerprint, model_dir, served_model_names
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.messages import PROTOCOL_VERSION, EngineReady, FrontendHello, Heartbeat, SayHello, ToFrontend

log = structlog.get_logger()


class Banner:
    """Listens to the scheduler like a frontend, to learn when the engine is ready and how large it is."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._channel: Dealer[ToFrontend] = Dealer(
            self._context,
            config.ipc.frontend_address,
            "penstock-supervisor",
            Codec(ToFrontend),
            self._on_message,
        )
        self._say_hello()

    def _say_hello(self) -> None:
        print_of_model = fingerprint(model_dir(self._config))
        self._channel.send(FrontendHello(PROTOCOL_VERSION, "penstock-supervisor", print_of_model))

    def _on_message(self, message: ToFrontend) -> None:
        match message:
            case EngineReady() if not self._engine.done():
                self._engine.set_result(message)
            case SayHello():
                self._say_hello()
            case Heartbeat():
                self._channel.send(Heartbeat())

    async def announce(self, frontends_ready: list[asyncio.Event]) -> None:
        """Wait for the engine and all frontends, then say so: as text on a terminal, as a log line elsewhere."""
        engine = await self._engine
        for ready in frontends_ready:
            await ready.wait()
        host = self._config.frontend.host
        shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        url = f"http://{shown_host}:{self._config.frontend.port}"
        name = served_model_names(self._config)[0]
        num_tokens = engine.num_pages * engine.page_size
        log.info(
            "serving",
            url=url,
            model=name,
            kv_tokens=num_tokens,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
        )
        if sys.stdout.isatty():
            print(_text(url, name, num_tokens, engine), flush=True)

    def close(self) -> None:
        """Leave the scheduler's list of peers."""
        self._channel.close()
        self._context.term()


def _text(url: str, name: str, num_tokens: int, engine: EngineReady) -> str:
    body = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "What is a KV cache?"}]})
    return (
        f"\n  {name} is served at {url}/v1\n"
        f"  The KV pool holds {num_tokens:,} tokens: {num_tokens // 1024:,} chats of 1k tokens at once, "
        f"{engine.max_num_seqs} of them in one step.\n"
        f"  Try it:\n\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )
