"""The frontend as Ray Serve's ingress: Serve's proxies own the sockets, and replicas run the API's handlers.

client ──HTTP──▶ Serve's proxy ──ASGI──▶ Frontend ──ZeroMQ──▶ engines (`engine.py`), found by `fleet.py`
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
import zmq
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from penstock.config import Config
from penstock.config.api_keys import load_api_keys
from penstock.deploy.ray.engine import EngineCard
from penstock.deploy.ray.fleet import Fleet
from penstock.deploy.ray.many_models import ManyModels
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import load_text_model
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import EngineRouter
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.http.asgi import AsgiApp
from penstock.frontend.http.observers import Observing, observing
from penstock.frontend.http.private_parts import check_private_parts
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.logs import setup_logging
from penstock.models.check import check_checkpoint
from penstock.models.files.source import fingerprint
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model

log = structlog.get_logger()

_ASK_SECONDS = 5.0
_LOOK_SECONDS = 0.5
"""Between two checks of which engines exist. This limits the pause of a stream when its engine has died."""


class Frontend:
    """The replica: a service for each model."""

    def __init__(self, *models: tuple[bytes, DeploymentHandle]) -> None:
        """`models`: for each model, a Config in JSON, and the handle of its engines."""
        self._name = f"frontend-{serve.get_replica_context().replica_id.unique_id}"
        self._models = [
            _Model(self._name, msgspec.json.decode(config, type=Config), engines) for config, engines in models
        ]

    async def __serve_build_asgi_app__(self) -> AsgiApp | ManyModels:
        """Wait for an engine of each model, and load the models' text sides; called by Serve after the constructor.

        Raises:
            ConfigError: if a checkpoint cannot be served, or a file that the options name cannot be used.
        """
        options = self._models[0].config.frontend
        log_options = self._models[0].config.log
        setup_logging(f"penstock-{self._name}", log_options.log_level, log_options.log_format)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # requests run in parallel already
        check_private_parts()
        if not load_api_keys(options.api_keys_file) and not options.insecure_bind:
            log.warning("no API keys: anyone who reaches Ray Serve's port can use the server")
        services = [await model.start() for model in self._models]
        # Without keys, web pages must not reach it by a host name of their own, unless an option opens it to any name.
        host = "" if options.insecure_bind else "127.0.0.1"
        return AsgiApp(services[0], host) if len(services) == 1 else ManyModels(services, host)

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises."""
        for model in self._models:
            model.check()

    async def __del__(self) -> None:
        """Called by Serve before it ends the replica, when no request is left."""
        for model in self._models:
            await model.close()


class _Model:
    """One model's service, and its links to the engines."""

    def __init__(self, name: str, config: Config, engines: DeploymentHandle) -> None:
        self.config = config
        self._name = name
        self._engines = engines
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._service: Service | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._observing: list[Observing] = []

    async def start(self) -> Service:
        """Wait for the first engine."""
        self.config = config = await asyncio.to_thread(_located, self.config)
        self._fingerprint = fingerprint(open_model(config))
        model = await asyncio.to_thread(load_text_model, config)
        vllm_model = model.names[0] if config.frontend.metrics_names == "both" else ""
        price = config.frontend.price_per_hour
        self._metrics = Metrics(lambda: book.all_stats, price_per_hour=price, vllm_model=vllm_model)
        fleet = Fleet(self._ask, self._connect, _LOOK_SECONDS)
        router = EngineRouter(config.frontend.routing, config.scheduler, self._metrics.registry)
        book = RequestBook(await fleet.first(), config.scheduler, router)
        self._observing = observing(config.frontend)
        observers = tuple(each.note for each in self._observing)
        self._service = service = Service(config, model, book, self._metrics, observers=observers)
        await service.start()
        self._tasks = [asyncio.create_task(work) for work in (fleet.follow(book), service.generations.keep_alive())]
        return service

    def check(self) -> None:
        """Raise what has ended a task that must not end."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def close(self) -> None:
        """End the service, if it has begun."""
        for task in self._tasks:
            task.cancel()
        if self._service is not None:
            await self._service.close()
            for each in self._observing:
                await each.close()
            self._context.term()

    async def _ask(self) -> Sequence[EngineCard]:
        try:
            asked = self._engines.broadcast("card")
            answers: list[Any] = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except (RayServeException, TimeoutError):  # there is no engine now
            return ()
        return [answer for answer in answers if isinstance(answer, EngineCard)]

    def _connect(self, card: EngineCard) -> EngineLink:
        ipc = self.config.ipc
        to = EngineAddress(
            card.address,
            self._name,
            self._fingerprint,
            ipc.heartbeat_interval,
            ipc.heartbeat_timeout,
            ChannelKeys(card.public_key, card.secret_key),
            label=card.name,
        )
        connect = over_sockets(self._context, self._metrics.dropped_messages.inc)
        return EngineLink(to, connect, log.error)


def _located(config: Config) -> Config:
    """The configuration with the path of the checkpoint; without its weights if it has to be downloaded."""
    found = located(config, with_weights=False, with_tokenizer=True)
    check_checkpoint(
        open_model(found),
        found.model.model_impl,
        found.worker.quantization,
        found.worker.kv_cache_dtype,
        with_weights=False,
        with_tokenizer=True,
    )
    return found
