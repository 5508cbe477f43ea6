"""Options of samplers."""

from importlib.metadata import entry_points
from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions

GROUP = "penstock.logits_processors"
"""Entry points of logits processors, by name."""


class SamplerOptions(PartOptions, frozen=True):
    """Which logits processors requests may ask for ([samplers](samplers.md#logits-processors))."""

    part: ClassVar[str] = "samplers"
    title: ClassVar[str] = "Samplers"
    beside: ClassVar[str] = "model"

    logits_processors: Annotated[
        tuple[str, ...],
        Meta(
            description="Logits processors that requests may ask for by name, each a name and where it is in Python. "
            "They run in the workers, row by row, and are as slow as they are written. Those with an entry point in "
            f"{GROUP} need no option."
        ),
        Shown("NAME=MODULE:OBJECT"),
    ] = ()

    @property
    def places(self) -> dict[str, str]:
        """Name -> module and object. A processor without a name has its object's."""
        found = {point.name: point.value for point in entry_points(group=GROUP)}
        for given in self.logits_processors:
            name, equals, place = given.rpartition("=")
            found[name if equals else place.rpartition(":")[2]] = place
        return found

    @property
    def processor_names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.places)

    def problem(self, config: Config) -> str:
        """Each needs a place."""
        for given in self.logits_processors:
            name, equals, place = given.rpartition("=")
            module, _, found = place.partition(":")
            if not module or not found or (equals and not name):
                return f"--logits-processors {given!r}: it must be NAME=MODULE:OBJECT"
        return ""


PARTS = (SamplerOptions,)
