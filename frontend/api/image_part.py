"""What a frontend needs of the part that puts images into prompts, if there is one."""

from collections.abc import Awaitable, Callable, Sequence

from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.image_source import ImageLimits, ImageSource
from penstock.frontend.part import FrontendPart
from penstock.frontend.prompt import Prompt


class ImagePart(FrontendPart):
    """Reads images, and finds their places in prompts; at most one part does. Without one, requests hold texts only."""

    limits: ImageLimits
    """What requests may hold."""

    async def prompt(
        self,
        text: str,
        sources: Sequence[ImageSource],
        encode: Callable[[str], Awaitable[list[int]]],
        record: RequestRecord,
    ) -> Prompt:
        """The prompt of a conversation's text with its images in their places.

        The images are held until the record's request has ended. `encode` returns a text's token ids.

        Raises:
            InvalidImage: an image cannot be read or fetched.
            InvalidRequest: the text has no place for an image, or spells one out; or the images are too large to send.
            Overloaded, Unavailable: images cannot be read now.
        """
        raise NotImplementedError
