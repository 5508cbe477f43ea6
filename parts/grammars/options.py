"""Options of grammars."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.part_options import PartOptions


class GrammarOptions(PartOptions, frozen=True):
    """How what outputs must match is read ([structured output](structured-output.md))."""

    part: ClassVar[str] = "grammars"
    title: ClassVar[str] = "Structured output"
    beside: ClassVar[str] = "frontend"

    open_objects: Annotated[
        bool,
        Meta(
            description="Let objects have properties that their JSON schema does not list, as the standard says "
            "(docs/structured-output.md). By default they have no others, unless the schema speaks of them."
        ),
    ] = False


PARTS = (GrammarOptions,)
