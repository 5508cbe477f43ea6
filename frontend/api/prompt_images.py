"""From a conversation's images to its prompt. What this needs is imported only for models that take images."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.frontend.errors import InvalidRequest
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.image_source import ImageLimits, ImageSource
from penstock.frontend.prompt import Prompt
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.ipc import shared_files
from penstock.ipc.messages import ImageRef, PixelRef
from penstock.ipc.sockets import MAX_MESSAGE_BYTES
from penstock.models.finding.registry import open_model

if TYPE_CHECKING:
    from penstock.frontend.images.families import ImageFamily
    from penstock.frontend.images.reader import ImageReader, Pixels, ReadImage


class PromptImages:
    """Reads images and finds their places in the prompt; lives in a running event loop until `close`."""

    def __init__(
        self, family: "ImageFamily", image_token_id: int, reader: "ImageReader", limits: ImageLimits, *, is_remote: bool
    ) -> None:
        """`is_remote`: an engine may be on another machine, which cannot see this one's shared memory."""
        self._family = family
        self._image_token_id = image_token_id
        self.reader = reader
        self.limits = limits
        self.is_foreign = family.is_foreign
        self._is_remote = is_remote

    async def close(self) -> None:
        """End the processes that read images, and free their memory."""
        await self.reader.close()

    async def read(
        self, sources: Sequence[ImageSource], text: str, record: RequestRecord
    ) -> tuple[list["ReadImage"], str]:
        """Read a conversation's images; return them, and its text with a placeholder for each.

        The images are held until the record's request has ended.

        Raises:
            InvalidImage: an image cannot be read or fetched.
            InvalidRequest: the chat template has no place for an image.
            Overloaded, Unavailable: images cannot be read now.
        """
        from penstock.frontend.images.prompt import check_marks, with_placeholders
        from penstock.frontend.images.reader import ImageHold

        check_marks(text, self._family.mark, len(sources))
        hold, before = ImageHold(), record.on_end

        def end() -> None:
            hold.release()
            if before is not None:
                before()

        record.on_end = end
        read = await self.reader.read(sources, hold, record.tenant)
        return read, with_placeholders(text, self._family.mark, [image.placeholder for image in read])

    async def placed(self, token_ids: list[int], read: Sequence["ReadImage"]) -> Prompt:
        """The prompt of a text's tokens, with its images in their places.

        Raises:
            InvalidRequest: the messages spell out the placeholder token, or the images are too large to send.
        """
        from penstock.frontend.images.prompt import expanded

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


def prompt_images(config: Config, tokenizer: TextTokenizer) -> tuple[PromptImages | None, str]:
    """What puts images into this model's prompts; None if it is served as text only, and then why.

    The reason is a clause; it is empty for models that see nothing anyway.

    Raises:
        ConfigError: the model's image processor has settings that make no sense, or do not fit its vision tower.
    """
    checkpoint, options = open_model(config), config.frontend
    if not checkpoint.config.get("vision_config") and not checkpoint.processor_config:
        return None, ""  # most models: nothing more is imported for them
    if not options.max_images:
        return None, "the server was started with --max-images 0"
    from penstock.frontend.images.families import image_family_of
    from penstock.frontend.images.fit import check_fit
    from penstock.frontend.images.reader import ImageReader
    from penstock.models.description.decoder import Decoder
    from penstock.models.families.registry import parse_model_config
    from penstock.models.parsing.vision.foreign import why_no_images

    family = image_family_of(checkpoint)
    image_token_id = None if family is None else tokenizer.token_id(family.token)
    model = parse_model_config(checkpoint.config, config.model.model_impl)
    vision = model.vision if isinstance(model, Decoder) else None
    lacks = "" if family is None else family.lacks
    if family is None or image_token_id is None or lacks or vision is None:
        return None, lacks or why_no_images(model.text_part_of, has_processor=bool(checkpoint.processor_config))
    check_fit(checkpoint, family, image_token_id, vision)
    limits = ImageLimits(options.max_images)
    is_remote = "tcp://" in str(config.ipc.frontend_address)
    reader = ImageReader(checkpoint.path, options, limits)
    return PromptImages(family, image_token_id, reader, limits, is_remote=is_remote), ""
