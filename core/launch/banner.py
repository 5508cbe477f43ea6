"""The output of `penstock serve` at its start: what it found, how much fits, where it listens, a command to try.

On a terminal this is text on stdout; otherwise it is log lines with the same content.
"""

import asyncio
import json
import sys
from typing import IO, cast

import structlog
import zmq
from rich.console import Console
from rich.markup import escape

from penstock.config import Config, FrontendOptions, channel_keys
from penstock.config.parts import with_parts
from penstock.config.sizes import size
from penstock.config.slow_kernels import slow_kernels
from penstock.ipc.addresses import addresses_in
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.logs import LogSink, SinkStream
from penstock.ipc.messages import PROTOCOL_VERSION, EngineReady, FrontendHello, Heartbeat, SayHello, ToFrontend
from penstock.ipc.version import VERSION
from penstock.models.described import model_config_of
from penstock.models.description.model_config import ModelConfig
from penstock.models.embeddings import embeddings_of
from penstock.models.files.source import LoadError, StoredTensor, fingerprint
from penstock.models.finding.registry import open_model, served_model_names
from penstock.models.parsing.text_part import WHOLE_MODELS

log = structlog.get_logger()

_CHAT_TOKENS = 1024
_QUESTION = "What is a KV cache?"
_FLUSH_SECONDS = 1.0


class Banner:
    """Listens to the first scheduler as a frontend does, to learn when its engine is ready and how large it is."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._output = LogSink(1)  # the terminal may go away before the server does
        self._console: Console | None = None
        if sys.stdout.isatty():
            self._console = Console(file=cast(IO[str], SinkStream(self._output, 1)), highlight=False, soft_wrap=True)
        self._checkpoint = open_model(config)
        self._model = model_config_of(self._checkpoint, config.model.model_impl, with_weights=False)
        self._name = served_model_names(config)[0]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._engine: asyncio.Future[EngineReady] = loop.create_future()
        self._channel: Dealer[ToFrontend] = Dealer(
            self._context,
            addresses_in(config.ipc.frontend_address)[0],
            "penstock-supervisor",
            Codec(with_parts(ToFrontend, "TO_FRONTEND")),
            self._on_message,
            channel_keys(config),
        )
        self._say_hello()

    def _say_hello(self) -> None:
        self._channel.send(FrontendHello(PROTOCOL_VERSION, "penstock-supervisor", fingerprint(self._checkpoint)))

    def _on_message(self, message: ToFrontend) -> None:
        match message:
            case EngineReady() if not self._engine.done():
                self._engine.set_result(message)
            case SayHello():
                self._say_hello()
            case Heartbeat():
                self._channel.send(Heartbeat())

    def begin(self) -> None:
        """Print what was found, before anything is loaded."""
        is_dummy = self._config.worker.load_format == "dummy"
        tensors = [] if is_dummy else self._tensors()
        num_parameters = sum(tensor.num_elements for tensor in tensors)
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        architectures = self._checkpoint.config.get("architectures") or ["unknown architecture"]
        is_part = architectures[0] in WHOLE_MODELS
        log.info(
            "model found",
            model=self._name,
            folder=str(self._checkpoint.path),
            architecture=architectures[0],
            parameters=num_parameters or None,
            weight_bytes=num_bytes or None,
        )
        weights = "random weights" if is_dummy else "no readable weights"
        if tensors:
            weights = f"{_short(num_parameters)} parameters, {size(num_bytes)}"
        self._say(f"\n  [bold]Penstock[/bold] {VERSION}\n")
        architecture = f"{escape(str(architectures[0]))}{' (its text part)' * is_part}"
        self._field("model", f"[bold]{escape(self._name)}[/bold]: {architecture}, {weights}")
        self._field("folder", escape(str(self._checkpoint.path.resolve())))

    def _tensors(self) -> list[StoredTensor]:
        """Return the tensors; none for a model without weights (for tests), or if a file changed since its check."""
        try:
            return list(self._checkpoint.tensors().values())
        except LoadError:
            return []

    async def announce(self, frontends_ready: list[asyncio.Event]) -> None:
        """Wait for the engine and all frontends, then announce the server."""
        engine = await self._engine
        for ready in frontends_ready:
            await ready.wait()
        options = self._config.frontend
        url = _url(options, options.host, options.port)
        admin_url = None if options.admin_address is None else _url(options, *options.admin_address)
        num_tokens, num_engines = engine.num_pages * engine.page_size, self._config.parallel.data_parallel_size
        seconds = asyncio.get_running_loop().time() - self._began
        log.info(
            "serving",
            url=url,
            admin_url=admin_url,
            model=self._name,
            engines=num_engines if num_engines > 1 else None,
            device=engine.device,
            dtype=engine.dtype,
            kernels=engine.kernels,
            kv_tokens=num_tokens,
            host_kv_tokens=engine.num_host_pages * engine.page_size or None,
            failed_tiers=engine.failed_tiers or None,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            start_seconds=round(seconds, 1),
        )
        self._field("device", f"{escape(engine.device)}, {engine.dtype}, kernels: {engine.kernels}")
        if slow := slow_kernels(engine.device, engine.kernels):
            if self._console is None:
                log.warning("slow kernels", reason=slow)
            self._field("", f"[yellow]{escape(slow)}[/yellow]")
        if engine.kernels == "transformers":
            self._field("", "Computed by transformers' own code: slower than the models that Penstock implements")
        if num_engines > 1:
            self._field("engines", f"{num_engines}, each with a KV pool of its own")
        if self._model.draws_tokens:
            self._field("KV pool", pool_text(num_tokens, engine.max_num_seqs, engine.max_model_len))
        else:
            kind = "classes" if self._model.num_classes else "vectors"
            longest = embeddings_of(self._checkpoint, options, self._model).max_len or engine.max_model_len
            told = f"{kind} of texts of at most {min(longest, engine.max_model_len):,} tokens; it generates none"
            self._field("answers", told)
        if engine.num_host_pages:
            num_host_tokens = engine.num_host_pages * engine.page_size
            self._field("host KV", f"{num_host_tokens:,} tokens: what the pool gives up, and preempted sequences")
        if engine.failed_tiers:
            self._field("", f"[yellow]Without the {' and '.join(engine.failed_tiers)} tier: see the log[/yellow]")
        self._field("ready", f"[bold green]{url}/v1[/bold green] after {seconds:.1f} s")
        if admin_url is not None:
            self._field("admin", f"{admin_url}/metrics")
        self._say(f"\n  Try it:\n\n{escape(curl_line(url, self._name, self._model))}")
        if self._model.draws_tokens:
            self._say(f"\n  or: penstock chat --url {url}")
        self._say("\n  [dim]Ctrl-C stops the server; --log-level info shows every request.[/dim]\n")

    def ending(self) -> None:
        """The server was asked to end."""
        self._say("\n  [dim]Stopping: running streams may finish; Ctrl-C again ends them too.[/dim]")

    def close(self) -> None:
        """Disconnect from the scheduler."""
        self._channel.close()
        self._context.term()
        self._output.flush(_FLUSH_SECONDS)

    def _field(self, name: str, text: str) -> None:
        self._say(f"  [cyan]{name:<9}[/cyan]{text}")

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text)


def pool_text(num_tokens: int, max_num_seqs: int, max_model_len: int) -> str:
    """The size of a KV pool in terms that are easy to picture."""
    num_chats = num_tokens // _CHAT_TOKENS
    if num_chats < 1:
        meaning = f"less than one chat of {_CHAT_TOKENS:,} tokens"
    elif num_chats <= max_num_seqs:
        meaning = f"{num_chats:,} chats of 1k tokens at once"
    else:
        meaning = f"{max_num_seqs:,} chats of 1k tokens at once, and {num_chats - max_num_seqs:,} more cached"
    return f"{num_tokens:,} tokens: {meaning}; at most {max_model_len:,} each"


def curl_line(url: str, name: str, model: ModelConfig | None = None) -> str:
    """A command to paste into a shell, for what the model does."""
    path, fields = "chat/completions", {"stream": True, "messages": [{"role": "user", "content": _QUESTION}]}
    if model is not None and not model.draws_tokens:
        path, fields = "classify" if model.num_classes else "embeddings", {"input": _QUESTION}
    body = json.dumps({"model": name} | fields).replace("'", "'\\''")
    return f"curl -N {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"


def _url(options: FrontendOptions, host: str, port: int) -> str:
    """The URL under which this machine reaches the listener."""
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if options.tls_certificate else 'http'}://{shown_host}:{port}"


def _short(count: int) -> str:
    for unit, letter in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {letter}"
    return f"{count:,}"
