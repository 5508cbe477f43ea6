"""A prompt: its tokens, and the images that have places among them."""

from dataclasses import dataclass, replace

from msgspec import structs

from penstock.ipc.messages import ImageRef


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens and images that the engine computes before any output."""

    token_ids: list[int]
    images: tuple[ImageRef, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def after(self, token_ids: list[int]) -> "Prompt":
        """The prompt preceded by other tokens."""
        return replace(self._moved(len(token_ids)), token_ids=token_ids + self.token_ids)

    def without_first(self) -> "Prompt":
        """The prompt without its first token, which must not belong to an image."""
        return replace(self._moved(-1), token_ids=self.token_ids[1:])

    def _moved(self, by: int) -> "Prompt":
        images = tuple(structs.replace(image, start=image.start + by) for image in self.images)
        return Prompt(self.token_ids, images)
