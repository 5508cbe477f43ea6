"""What adapters say of texts: tokenizers and chat templates of their own, where they differ from the model's.

Most adapters come with copies of the model's files, or with those that others of the same training have. So each
tokenizer and template is held once, however many adapters have it, and has one pool of helper processes.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from penstock.frontend.api.service import PromptReader, Service, Variant
from penstock.frontend.api.text_model import TextModel, load_variant_texts
from penstock.models.finding.registry import model_path

_CLOSE_SECONDS = 30.0
"""How long helper processes stay after their last adapter: requests that have been let in may still wait for them."""


@dataclass(slots=True)
class _Own:
    """Texts that are not the model's."""

    model: TextModel
    prompts: PromptReader
    keys: set[str] = field(default_factory=set)  # the adapters that have them


class _Read(NamedTuple):
    model: TextModel
    template_file: str


class Texts:
    """The texts of all adapters of one frontend. Lives in a running event loop until `close`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._own: dict[str, _Own] = {}  # by the digest of the texts
        self._one_by_one = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def variant(self, name: str, key: str, path: str, root: str) -> Variant:
        """Read an adapter's texts, unless they are known.

        Raises:
            ConfigError: if one of them cannot be used with this model.
        """
        service = self._service
        async with self._one_by_one:
            read = _Read(*await asyncio.to_thread(load_variant_texts, service.config, service.model, name, Path(path)))
            model, prompts = read.model, service.prompts
            if model.tokenizer is not service.model.tokenizer or model.template is not service.model.template:
                own = self._own.get(model.digest)
                if own is None:
                    own = self._own[model.digest] = await self._learnt(read, path)
                elif model.tokenizer not in (service.model.tokenizer, own.model.tokenizer):
                    model.tokenizer.close()
                own.keys.add(key)
                model, prompts = replace(own.model, names=(name,)), own.prompts
        return Variant(model, prompts, key, root, service.model.names[0])

    async def _learnt(self, read: _Read, path: str) -> _Own:
        """Texts with a reader of their own, and what their template was seen to do."""
        service = self._service
        prompts = PromptReader(
            model_path(service.config),
            read.template_file,
            read.model.tokenizer,
            parse_special_tokens=service.config.frontend.parse_special_tokens,
            images=service.prompts.images,
            texts=path,
        )
        model = read.model
        if model.template is not None and (facts := await prompts.look()) is not None:
            model = model.with_facts(facts, service.config.frontend)
        return _Own(model, prompts)

    def drop(self, key: str) -> None:
        """An adapter is gone. Its tokenizer lives on with the streams that use it."""
        for digest, own in list(self._own.items()):
            own.keys.discard(key)
            if not own.keys:
                del self._own[digest]
                task = asyncio.create_task(_later(own.prompts))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all helper processes."""
        for task in self._closing:
            task.cancel()  # it closes its reader at once
        await asyncio.gather(*self._closing, *(own.prompts.close() for own in self._own.values()))


async def _later(prompts: PromptReader) -> None:
    """Close a reader after a while, or at once if this is cancelled."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(_CLOSE_SECONDS)
    await prompts.close()
