"""What adapters say of texts: tokenizers and chat templates of their own, where they differ from the model's.

Most adapters come with copies of the model's files, or with those that others of the same training have. So equal files
are read once, and texts that mean the same as the model's are the model's own.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.frontend.api.service import PromptReader, Service, Variant
from penstock.frontend.api.text_model import TextModel, load_variant_texts
from penstock.models.files.texts import texts_digest
from penstock.models.finding.registry import model_path

_CLOSE_SECONDS = 30.0
"""How long helper processes stay after their last adapter: requests that have been let in may still wait for them."""


@dataclass(slots=True)
class _Own:
    """The texts of some files, and those who have them."""

    model: TextModel
    prompts: PromptReader
    keys: set[str] = field(default_factory=set)  # of adapters


class Texts:
    """The texts of all adapters of one frontend. Lives in a running event loop until `close`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._own: dict[str, _Own] = {}  # by a digest of the files
        self._one_by_one = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def variant(self, name: str, key: str, path: str, root: str) -> Variant:
        """Read an adapter's texts, unless they are known.

        Raises:
            ConfigError: if one of them cannot be used with this model.
        """
        async with self._one_by_one:
            files = await asyncio.to_thread(texts_digest, Path(path))
            own = self._own.get(files)
            if own is None:
                own = self._own[files] = await self._read(path)
            own.keys.add(key)
            self.drop(key, but=own)  # it may have had others
        return Variant(replace(own.model, names=(name,)), own.prompts, key, root, self._service.model.names[0])

    async def _read(self, path: str) -> _Own:
        """The texts at a path, and what their template is seen to do; the model's own if they mean the same."""
        service = self._service
        model, template_file = await asyncio.to_thread(load_variant_texts, service.config, service.model, Path(path))
        if model is service.model:
            return _Own(model, service.prompts)
        prompts = PromptReader(
            model_path(service.config),
            template_file,
            model.tokenizer,
            parse_special_tokens=service.config.frontend.parse_special_tokens,
            images=service.prompts.images,
            texts=path,
        )
        if model.template is not None and (facts := await prompts.look()) is not None:
            model = model.with_facts(facts, service.config.frontend)
        return _Own(model, prompts)

    def drop(self, key: str, but: _Own | None = None) -> None:
        """An adapter is gone, or has other texts now. Its tokenizer lives on with the streams that use it."""
        for files, own in list(self._own.items()):
            if own is but:
                continue
            own.keys.discard(key)
            if not own.keys:
                del self._own[files]
            if not own.keys and own.prompts is not self._service.prompts:
                task = asyncio.create_task(_later(own.prompts))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all helper processes."""
        for task in self._closing:
            task.cancel()  # it closes its reader at once
        readers = {own.prompts for own in self._own.values()} - {self._service.prompts}
        await asyncio.gather(*self._closing, *(reader.close() for reader in readers))


async def _later(prompts: PromptReader) -> None:
    """Close a reader after a while, or at once if this is cancelled."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(_CLOSE_SECONDS)
    await prompts.close()
