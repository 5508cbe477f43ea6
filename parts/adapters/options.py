"""Options of adapters."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions


class AdapterOptions(PartOptions, frozen=True):
    """Which adapters are served from the start."""

    part: ClassVar[str] = "adapters"
    title: ClassVar[str] = "Adapters"
    beside: ClassVar[str] = "model"

    lora: Annotated[
        tuple[str, ...],
        Meta(
            description="Adapters of the model, each a name in the API and where it is: a folder of PEFT's, a GGUF "
            "file of llama.cpp's, or ORG/NAME[@REVISION] of the Hugging Face hub."
        ),
        Shown("NAME=PATH", also=("--lora-modules", "--lora-paths", "--lora-adapters")),
    ] = ()

    max_loras: Annotated[
        int,
        Meta(
            description="Most adapters in a worker's memory at a time. Requests with others wait until one of these "
            "has none; the least recently used one goes.",
            ge=1,
            le=4096,
        ),
        Shown(also=("--max-loras-per-batch",)),
    ] = 32

    max_cpu_loras: Annotated[
        int,
        Meta(
            description="Most adapters that a worker keeps in the host's memory, at most 4 GiB of them: their turns in "
            "--max-loras come again without reading files. The least recently used one goes.",
            ge=1,
            le=65536,
        ),
        Shown(also=("--max-loaded-loras",)),
    ] = 256

    max_lora_rank: Annotated[
        int,
        Meta(description="Largest rank of an adapter; one with a larger rank is refused.", ge=1, le=1024),
    ] = 256

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path."""
        return {name: path for name, _, path in (given.partition("=") for given in self.lora)}

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those of the adapters."""
        return tuple(self.adapters)

    def problem(self, config: Config) -> str:
        """Each needs a name and a place, and no two have the same name."""
        for given in self.lora:
            name, _, path = given.partition("=")
            if not name or not path:
                return f"--lora {given!r}: it must be NAME=PATH, with the name that requests give as their model"
        return "" if len(self.adapters) == len(self.lora) else f"--lora: two adapters have one name: {self.lora}"


PARTS = (AdapterOptions,)
