"""One frontend from start to end: service, engine connection, HTTP server, drain."""

import asyncio
import logging
import socket
from collections.abc import Callable

import structlog
import zmq

from penstock.config import Config, ConfigError
from penstock.config.api_keys import load_api_keys
from penstock.config.listening import has_files
from penstock.config.tls import load_certificate, load_tls
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import load_text_model
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import engine_addresses, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import router_for
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.metrics_board import MetricsBoard
from penstock.frontend.http.app import Part, make_app
from penstock.frontend.http.connections import MAX_CONNECTIONS, BoundedRunner, Timeouts, connections_within_limit
from penstock.frontend.http.observers import observing
from penstock.frontend.http.proxies import TrustedProxies
from penstock.frontend.http.routes import ROUTES
from penstock.ipc import process
from penstock.models.files.source import fingerprint
from penstock.models.finding.registry import open_model

log = structlog.get_logger()

KEEPALIVE_SECONDS = 75.0
_SHARE_SECONDS = 1.0  # how old other frontends' metrics may be


class Server:
    """Create it inside a running event loop, `start`, wait for `stopped`, `close`."""

    def __init__(self, config: Config, name: str, board: MetricsBoard | None = None) -> None:
        """Load the text side of the model and connect to the scheduler. `board`: for metrics, with several frontends.

        Raises:
            ConfigError: if the checkpoint cannot be served, or a file that the options name cannot be used.
        """
        self._config = config
        self._name = name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stopped = asyncio.Event()
        """Set when the server should end (by a signal, or a refusal by the scheduler)."""
        self._hurry = asyncio.Event()
        self.exit_code = 0
        self._tls = load_tls(config.frontend)
        model = load_text_model(config)
        addresses = engine_addresses(config, name, fingerprint(open_model(config)))
        vllm_model = model.names[0] if config.frontend.metrics_names == "both" else ""
        metrics = Metrics(lambda: book.all_stats, board, config.frontend.price_per_hour, vllm_model)
        connect = over_sockets(self._context, metrics.dropped_messages.inc)
        links = [EngineLink(each, connect, self._on_refused) for each in addresses]
        book = RequestBook(links, config.scheduler, router_for(config, len(links), metrics.registry))
        self._observing = observing(config.frontend)
        observers = tuple(each.note for each in self._observing)
        self.service = Service(config, model, book, metrics, observers=observers, routes=ROUTES)
        self._max_connections = connections_within_limit(MAX_CONNECTIONS)
        parts: tuple[Part, ...] = ("all",) if config.frontend.admin_address is None else ("public", "admin")
        self._runners = [self._make_runner(part) for part in parts]
        self._tasks: list[asyncio.Task[None]] = []

    def _make_runner(self, part: Part) -> BoundedRunner:
        options = self._config.frontend
        return BoundedRunner(
            make_app(self.service, part),
            max_connections=self._max_connections,
            timeouts=Timeouts(options.head_timeout, options.body_timeout, options.slow_reader_timeout),
            count_closed=lambda reason: self.service.metrics.closed_connections.labels(reason).inc(),
            proxies=TrustedProxies(options.trusted_proxies),
            access_log=None,
            keepalive_timeout=KEEPALIVE_SECONDS,
            shutdown_timeout=1.0,  # for handlers that are still running after the drain
            auto_decompress=False,
            logger=_http_logger(),
        )

    async def start(self, *listeners: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve on bound sockets: the public one, and the administrators' one if the options name it.

        `on_ready` is called once, when requests can be served.
        """
        await self.service.meet_siblings(self._name)
        await self.service.start()
        for runner, listener in zip(self._runners, listeners, strict=True):
            await runner.setup()
            await runner.listen(listener, self._tls)
            host, port = listener.getsockname()[:2]
            is_admin = runner is not self._runners[0]
            facts = {"tls": self._tls is not None, "admin": is_admin, "model": self.service.model.names[0]}
            log.info("listening", host=host, port=port, **facts)
            self._tasks.append(asyncio.create_task(runner.watch()))
        self._tasks.append(asyncio.create_task(self.service.generations.keep_alive()))
        self._tasks.append(asyncio.create_task(self._announce(on_ready)))
        self._tasks.append(asyncio.create_task(self._share_metrics()))

    def end(self, *, at_once: bool) -> None:
        """Begin to stop: running streams may finish, but with `at_once` they get an error now, even during a drain."""
        if at_once:
            self._hurry.set()
        self.stopped.set()

    def reload(self) -> None:
        """Read the key file and the certificate again; a file that cannot be used changes nothing."""
        options = self._config.frontend
        for each in self._observing:
            each.reopen()
        if not has_files(options):
            log.info("nothing to reload: no key file, no certificate, no access log")
        try:
            if options.api_keys_file:
                self.service.access.change(load_api_keys(options.api_keys_file))
                log.info("API keys reloaded", file=options.api_keys_file)
        except ConfigError as error:
            log.error("API keys not reloaded", reason=str(error))
        try:
            if self._tls is not None:
                load_tls(options)  # try first: loading a key that does not fit the certificate would break both
                load_certificate(self._tls, options)
                log.info("certificate reloaded", file=options.tls_certificate)
        except ConfigError as error:
            log.error("certificate not reloaded", reason=str(error))

    async def close(self) -> None:
        """Drain, then close everything."""
        await self.service.parts.stop()
        await self.service.generations.drain(self._config.frontend.shutdown_timeout, self._hurry)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for runner in self._runners:
            await runner.cleanup()
        await self.service.close()
        for each in self._observing:
            await each.close()
        self._context.term()
        self.service.metrics.share()
        log.info("frontend stopped")

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self.service.engine.ready.wait()
        on_ready()
        if (facts := self.service.engine.last_facts) is not None:
            await self.service.parts.engine_ready(facts)

    async def _share_metrics(self) -> None:
        while True:
            self.service.metrics.share()
            await asyncio.sleep(_SHARE_SECONDS)

    def _on_refused(self, reason: str) -> None:
        self.exit_code = process.EXIT_CONFIG
        self.stopped.set()


class _OneLine(logging.Handler):
    """Logs each of aiohttp's messages (mostly about invalid HTTP) as one line of our log, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        log.warning(
            "HTTP request invalid", message=record.getMessage()[:256], reason=repr(error)[:256] if error else None
        )


def _http_logger() -> logging.Logger:
    logger = logging.Logger("penstock.http", logging.WARNING)  # outside the global tree, so configured here alone
    logger.addHandler(_OneLine())
    return logger
