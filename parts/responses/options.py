"""Options of stored responses."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.part_options import PartOptions


class ResponseOptions(PartOptions, frozen=True):
    """How much is kept of responses and conversations ([API](api.md#responses))."""

    part: ClassVar[str] = "responses"
    title: ClassVar[str] = "Stored responses"
    beside: ClassVar[str] = "frontend"

    max_stored_response_bytes: Annotated[
        int,
        Meta(
            description="Most bytes of stored responses per API key, for previous_response_id. The least recently used "
            "are dropped first. 0: store none.",
            ge=0,
        ),
    ] = 64 << 20


PARTS = (ResponseOptions,)
