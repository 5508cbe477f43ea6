"""Options of images in requests."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.groups.base import Shown
from penstock.config.part_options import PartOptions


class ImageOptions(PartOptions, frozen=True):
    """Which images a frontend reads, and how much memory it has for them ([images](images.md))."""

    part: ClassVar[str] = "images"
    title: ClassVar[str] = "Images"
    beside: ClassVar[str] = "frontend"

    image_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts from which images of requests are fetched (docs/images.md), such as cdn.example.org, "
            "*.example.org or cdn.example.org:8443; never from private addresses. Empty: images come in data: URLs."
        ),
        Shown("HOST", "hosts from which images of requests are fetched"),
    ] = ()
    max_images: Annotated[
        int, Meta(description="Most images in one request to a model that takes images. 0: none.", ge=0, le=1024)
    ] = 16
    image_memory_gib: Annotated[
        float,
        Meta(
            description="Shared memory of each frontend for the pixel values of images, of which one may take an "
            "eighth. Images of requests that have ended are kept in it while there is room.",
            gt=0.0,
        ),
    ] = 4.0

    @property
    def reads_no_images(self) -> bool:
        return not self.max_images


PARTS = (ImageOptions,)
