"""From a conversation's images to its prompt. What this needs is imported only for models that take images."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Self

from penstock.frontend.api.image_part import ImagePart
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidRequest
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.image_source import ImageLimits, ImageSource
from penstock.frontend.prompt import Prompt
from penstock.ipc import shared_files
from penstock.ipc.messages import EngineReady, ImageRef, PixelRef
from penstock.ipc.sockets import MAX_MESSAGE_BYTES
from penstock.models.finding.registry import open_model
from penstock.parts.images.options import ImageOptions

if TYPE_CHECKING:
    from penstock.parts.images.families import ImageFamily
    from penstock.parts.images.frontend.reader import ImageReader, Pixels, ReadImage


class Images(ImagePart):
    """Reads images and finds their places in the prompt; lives in a running event loop until `close`."""

    def __init__(
        self, family: "ImageFamily", image_token_id: int, reader: "ImageReader", limits: ImageLimits, *, is_remote: bool
    ) -> None:
        """`is_remote`: an engine may be on another machine, which cannot see this one's shared memory."""
        self._family = family
        self._image_token_id = image_token_id
        self.reader = reader
        self.limits = limits
        self._is_remote = is_remote

    @classmethod
    def of(cls, service: Service) -> Self | None:
        """What puts images into this model's prompts; None if the model takes no images.

        Raises:
            ConfigError: the model's image processor has settings that make no sense, or do not fit its vision tower.
        """
        config = service.config
        checkpoint, options = open_model(config), config.of(ImageOptions)
        if not options.max_images or not checkpoint.processor_config:
            return None
        from penstock.models.description.decoder import Decoder
        from penstock.models.families.registry import parse_model_config
        from penstock.parts.images.families import image_family_of
        from penstock.parts.images.frontend.fit import check_fit
        from penstock.parts.images.frontend.reader import ImageReader

        family = image_family_of(checkpoint)
        image_token_id = None if family is None else service.model.tokenizer.token_id(family.token)
        if family is None or image_token_id is None:
            return None
        model = parse_model_config(checkpoint.config, config.model.model_impl)
        if isinstance(model, Decoder) and model.vision is not None:
            check_fit(checkpoint, family, image_token_id, model.vision)
        limits = ImageLimits(options.max_images)
        is_remote = "tcp://" in str(config.ipc.frontend_address)
        memory = int(options.image_memory_gib * (1 << 30))
        reader = ImageReader(checkpoint.path, limits, hosts=options.image_hosts, max_bytes=memory)
        return cls(family, image_token_id, reader, limits, is_remote=is_remote)

    async def engine_ready(self, facts: EngineReady) -> None:
        if facts.takes_images:
            await self.reader.warm()

    async def close(self) -> None:
        """End the processes that read images, and free their memory."""
        await self.reader.close()

    async def prompt(
        self,
        text: str,
        sources: Sequence[ImageSource],
        encode: Callable[[str], Awaitable[list[int]]],
        record: RequestRecord,
    ) -> Prompt:
        read, text = await self._read(sources, text, record)
        return await self._placed(await encode(text), read)

    async def _read(
        self, sources: Sequence[ImageSource], text: str, record: RequestRecord
    ) -> tuple[list["ReadImage"], str]:
        """Read a conversation's images; return them, and its text with a placeholder for each."""
        from penstock.parts.images.frontend.prompt import check_marks, with_placeholders
        from penstock.parts.images.frontend.reader import ImageHold

        check_marks(text, self._family.mark, len(sources))
        hold, before = ImageHold(), record.on_end

        def end() -> None:
            hold.release()
            if before is not None:
                before()

        record.on_end = end
        read = await self.reader.read(sources, hold, record.tenant)
        return read, with_placeholders(text, self._family.mark, [image.placeholder for image in read])

    async def _placed(self, token_ids: list[int], read: Sequence["ReadImage"]) -> Prompt:
        """The prompt of a text's tokens, with its images in their places."""
        from penstock.parts.images.frontend.prompt import expanded

        placeholders = [image.placeholder for image in read]
        longer, spans = expanded(token_ids, self._image_token_id, placeholders)
        pixels = [await self._pixels(image.pixels) for image in read]
        if sum(len(each.inline) for each in pixels) > MAX_MESSAGE_BYTES // 2:
            raise InvalidRequest(
                f"the images have more than {MAX_MESSAGE_BYTES >> 21} MiB of pixel values, which is what one request "
                "can send to an engine on another machine",
                param="messages",
            )
        images = (
            ImageRef(image.key, span.start, span.length, span.num_embeddings, image.placeholder.grid, ref)
            for image, span, ref in zip(read, spans, pixels, strict=True)
        )
        return Prompt(longer, tuple(images))

    async def _pixels(self, pixels: "Pixels") -> PixelRef:
        if self._is_remote:
            content = await asyncio.to_thread(shared_files.read, pixels.segment, pixels.num_bytes)
            return PixelRef("", pixels.num_bytes, pixels.tensors, bytes(content))
        return PixelRef(pixels.segment, pixels.num_bytes, pixels.tensors)
