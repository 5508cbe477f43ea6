"""Which adapters there are, as engines tell, and what this frontend has read for them.

    --lora ─────▶ texts ─▶ served
    load ───────▶ texts ─▶ LoadAdapter to all engines ─▶ "ready" from all ─▶ served       (or from one an error: gone)
    AdapterNews ─▶ texts, while engines load it ─▶ "ready" from one ─▶ served             (another frontend's load)
    unload ─▶ not served ─▶ UnloadAdapter to all engines

An adapter is loaded under a key, NAME@VERSION, whose version is a digest of its files. So an adapter that replaces one
of the same name is another one, and nothing that was computed with the first is taken for the second's.

An engine that was restarted has only the adapters of `--lora`, and one in the caller's process not even these. So each
frontend sends all that it knows behind each hello, before its requests: also those that are unloaded, as long as
streams use them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import NamedTuple

import structlog

from penstock.config import ConfigError
from penstock.frontend.api.service import Service, Variant
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import InvalidParameter, ModelNotFound, Unavailable
from penstock.parts.adapters.frontend.texts import Texts
from penstock.parts.adapters.keys import key_of, name_of
from penstock.parts.adapters.messages import AdapterNews, AdapterState, LoadAdapter, UnloadAdapter

log = structlog.get_logger()

LOAD_SECONDS = 120.0
"""How long engines may take to load an adapter."""

SETTLE_SECONDS = 0.5
"""How long an adapter stays that was replaced: other frontends have to read the new one's texts."""

LOOK_SECONDS = 1.0
"""How often it is checked whether streams still use an adapter that was unloaded."""


class Known(NamedTuple):
    """An adapter that engines have, or were asked to load."""

    key: str
    path: str
    root: str  # as it was asked for
    is_fixed: bool = False  # an option names it

    @property
    def name(self) -> str:
        """Its name as a model."""
        return name_of(self.key)


class Leaving(NamedTuple):
    """An adapter that was unloaded; streams may still use it."""

    known: Known
    unconfirmed: set[EngineLink]  # their news may be older than the order


class Catalogue:
    """The adapters of one frontend. Lives in a running event loop until `close`."""

    def __init__(self, service: Service) -> None:
        """From now on, news of the service's engines is heard."""
        self._service = service
        self._texts = Texts(service)
        self._known: dict[str, Known] = {}  # by key
        self._leaving: dict[str, Leaving] = {}  # by key
        self._told: dict[EngineLink, dict[str, AdapterState]] = {}  # by key; since the link's last hello
        self._news = asyncio.Event()
        self._one_by_one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        for link in service.engine.links:
            link.listeners[AdapterNews] = partial(self._on_news, link)
            link.on_hello.append(partial(self._on_hello, link))

    async def serve_fixed(self, adapters: Mapping[str, str]) -> None:
        """Serve adapters that an option names: name -> path.

        Raises:
            ConfigError: one of them cannot be served.
        """
        for name, path in adapters.items():
            try:
                self._check_name(name)
                known = Known(await asyncio.to_thread(key_of, name, path), path, path, is_fixed=True)
                variant = await self._texts.variant(name, known.key, path, path)
            except (ConfigError, InvalidParameter) as error:
                raise ConfigError(f"--lora {name}={path}: {error}") from None
            self._known[known.key] = known
            self._service.variants[name] = variant
            self._tell_all(LoadAdapter(known.key, path))

    async def load(self, name: str, given: str, *, in_place: bool) -> None:
        """Load an adapter into all engines, and serve it under its name. Adapters are loaded one after the other.

        Args:
            name: of the model that it makes.
            given: its folder or file, or its name on the hub.
            in_place: whether it replaces one of the same name, whose streams go on with that one. One with the same
                weights gets the texts that are there now, and is read again where it could not be.

        Raises:
            InvalidParameter: it cannot be loaded, or there is one of this name.
            Unavailable: no engine is ready, or they take too long.
        """
        async with self._one_by_one:
            self._check_name(name)
            before = self._named(name)
            if before is not None and (before.is_fixed or not in_place):
                why = "it was named by --lora, and stays" if before.is_fixed else "load_inplace replaces it"
                raise InvalidParameter(f"there is an adapter {name!r} already: {why}", param="lora_name")
            try:
                path = await asyncio.to_thread(_located, given)
                known = Known(await asyncio.to_thread(key_of, name, path), path, given)
                variant = await self._texts.variant(name, known.key, path, given)
            except ConfigError as error:
                raise InvalidParameter(f"lora_path: {error}", param="lora_path") from None
            self._leaving.pop(known.key, None)
            self._known[known.key] = known
            same = before if before is not None and known.key == before.key else None  # but for texts, and the place
            try:
                if same is None or known.path != same.path or not self._is_ready(known.key):
                    await self._load_everywhere(known)
            except BaseException:
                if known.key in self._known:
                    self._drop(known, abort=True)
                raise
            self._serve(known, variant)
            log.info("adapter loaded", adapter=known.key, path=path)
            if before is not None and same is None:
                self._begin(self._replaced(before))

    def unload(self, name: str, *, abort: bool) -> None:
        """Serve an adapter no more. Its streams go on to their end, or with `abort` end with an error.

        Raises:
            ModelNotFound: there is none of this name.
            InvalidParameter: an option names it.
        """
        known = self._named(name)
        if known is None:
            raise ModelNotFound(f"there is no adapter {name[:128]!r}", param="lora_name")
        if known.is_fixed:
            raise InvalidParameter(f"the adapter {name!r} was named by --lora, and stays", param="lora_name")
        self._drop(known, abort=abort)
        log.info("adapter unloaded", adapter=known.key, aborts=abort)

    async def close(self) -> None:
        """The frontend ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._texts.close()

    # --- what is served ---------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name in self._service.model.names:
            raise InvalidParameter(f"{name!r} is the model's own name", param="lora_name")
        if not name.isprintable() or "@" in name:
            raise InvalidParameter(
                f"the name {name!r} has characters that a model's name must not have", param="lora_name"
            )

    def _named(self, name: str) -> Known | None:
        variant = self._service.variants.get(name)
        return None if variant is None else self._known.get(variant.adapter)

    def _serve(self, known: Known, variant: Variant) -> None:
        self._service.variants[known.name] = variant

    def _drop(self, known: Known, *, abort: bool) -> None:
        """Serve an adapter no more, and tell the engines."""
        told_by = {link for link, told in self._told.items() if known.key in told}
        self._forget(known, told_by)
        self._tell_all(UnloadAdapter(known.key, abort))

    def _forget(self, known: Known, unconfirmed: set[EngineLink]) -> None:
        """Serve an adapter no more; it is sent to engines that restart as long as streams use it."""
        del self._known[known.key]
        served = self._service.variants.get(known.name)
        if served is not None and served.adapter == known.key:
            del self._service.variants[known.name]
        self._leaving[known.key] = Leaving(known, unconfirmed)
        self._begin(self._left(known.key))

    async def _left(self, key: str) -> None:
        """Wait until nobody uses an adapter that was unloaded, and no old news can be of it."""
        while (leaving := self._leaving.get(key)) is not None:
            if not leaving.unconfirmed and not self._is_used(key):
                del self._leaving[key]
                self._texts.drop(key)
                if any(key in told for told in self._told.values()):  # an engine that restarted has it for its streams
                    self._tell_all(UnloadAdapter(key))
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def _is_fixed(self, key: str) -> bool:
        return key in self._known and self._known[key].is_fixed

    def _is_ready(self, key: str) -> bool:
        """Whether all engines that are there have it."""
        links = [link for link in self._service.engine.links if link.facts is not None]
        states = [self._told.get(link, {}).get(key) for link in links]
        return bool(states) and all(state is not None and state.state == "ready" for state in states)

    def _is_used(self, key: str) -> bool:
        return any(each.adapter == key for each in self._service.generations)

    async def _replaced(self, known: Known) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        if known.key in self._known:
            self._drop(known, abort=False)

    # --- engines ----------------------------------------------------------------------------------

    async def _load_everywhere(self, known: Known) -> None:
        links = [link for link in self._service.engine.links if link.facts is not None]
        if not links:
            raise Unavailable(f"no engine is ready: {self._service.engine.not_ready_reason}", retry_after=5)
        for told in self._told.values():
            told.pop(known.key, None)  # of an earlier load
        self._tell_all(LoadAdapter(known.key, known.path))

        def is_loading(link: EngineLink) -> bool:
            told = self._told.get(link, {}).get(known.key)
            return link.facts is not None and (told is None or told.state not in ("ready", "failed"))

        await self._until(lambda: known.key not in self._known or not any(map(is_loading, links)))
        if known.key not in self._known:
            raise Unavailable("the adapter was unloaded while it was loaded", retry_after=1)
        for told in self._told.values():
            if (state := told.get(known.key)) is not None and state.state == "failed":
                raise InvalidParameter(f"lora_path: {state.error}", param="lora_path")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for news.

        Raises:
            Unavailable: it does not come in time.
        """
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                while not is_so():
                    await self._news.wait()
        except TimeoutError:
            raise Unavailable(f"the engines have not loaded the adapter within {LOAD_SECONDS:g} s") from None

    def _tell_all(self, order: LoadAdapter | UnloadAdapter) -> None:
        for link in self._service.engine.links:
            link.send(order)

    def _on_hello(self, link: EngineLink) -> None:
        self._told.pop(link, None)
        for leaving in self._leaving.values():
            leaving.unconfirmed.discard(link)
        for known in self._known.values():
            link.send(LoadAdapter(known.key, known.path))
        for known, _ in self._leaving.values():
            if self._is_used(known.key):
                link.send(LoadAdapter(known.key, known.path, is_leaving=True))

    def _on_news(self, link: EngineLink, news: AdapterNews) -> None:
        before, now = self._told.get(link, {}), {each.key: each for each in news.adapters}
        self._told[link] = now
        for leaving in self._leaving.values():
            if leaving.known.key not in now or now[leaving.known.key].state == "leaving":
                leaving.unconfirmed.discard(link)
        for key, state in now.items():
            unloaded = self._leaving.get(key)
            if state.state == "failed" and before.get(key) != state and self._is_fixed(key):
                log.error("adapter not loaded", adapter=key, reason=state.error)
            if state.state == "leaving" and key in self._known:  # another frontend has unloaded it
                self._forget(self._known[key], set())
            elif state.state not in ("loading", "ready") or key in self._known:
                continue
            elif unloaded is None or link not in unloaded.unconfirmed:  # another frontend has loaded it
                self._adopt(Known(key, state.path, state.path))
        for key in before.keys() - now.keys():
            if key in self._known and not any(key in told for told in self._told.values()):
                self._forget(self._known[key], set())
        self._news.set()
        self._news = asyncio.Event()

    # --- other frontends' adapters ----------------------------------------------------------------

    def _adopt(self, known: Known) -> None:
        """Serve an adapter that another frontend has loaded."""
        self._leaving.pop(known.key, None)
        self._known[known.key] = known
        coming = self._service.coming
        task = coming[known.name] = self._begin(self._adopted(known))
        task.add_done_callback(lambda it: coming.pop(known.name) if coming.get(known.name) is it else None)

    async def _adopted(self, known: Known) -> None:
        def told() -> set[str]:
            return {told[known.key].state for told in self._told.values() if known.key in told}

        try:
            variant = await self._texts.variant(known.name, known.key, known.path, known.root)
            await self._until(lambda: "ready" in told() or not told() & {"loading"})
        except (ConfigError, Unavailable) as error:
            log.error("adapter of another frontend not served here", adapter=known.key, reason=str(error))
            return
        if known.key in self._known and "ready" in told():
            self._serve(known, variant)

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _located(given: str) -> str:
    """The path of an adapter; a name of the hub is downloaded."""
    from penstock.models.finding.located import located_adapter  # with all families, which few frontends need

    return str(located_adapter(given))
