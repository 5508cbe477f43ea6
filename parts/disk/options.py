"""Options of the disk tier."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions


class DiskOptions(PartOptions, frozen=True):
    """KV pages in files ([tiers](kv-tiers.md))."""

    part: ClassVar[str] = "disk"
    title: ClassVar[str] = "Disk"
    beside: ClassVar[str] = "worker"

    disk_kv: Annotated[
        str,
        Meta(
            description="Folder for KV pages of prefixes that are long or were used again: they survive a restart. Its "
            "files reveal prompts to whoever can read them. Needs --disk-kv-gib. Empty: none."
        ),
        Shown("PATH", "folder for KV pages that survive a restart"),
    ] = ""
    disk_kv_gib: Annotated[
        float,
        Meta(description="Most disk space for this model's KV pages in --disk-kv, in GiB.", ge=0.0),
        Shown(line="most disk space for --disk-kv"),
    ] = 0.0

    @property
    def writes_at_end(self) -> bool:
        """The scheduler lets the worker write the pages worth keeping."""
        return bool(self.disk_kv)

    def problem(self, config: Config) -> str:
        """A folder has a size, and one worker."""
        if bool(self.disk_kv) != bool(self.disk_kv_gib):
            return "--disk-kv FOLDER and --disk-kv-gib SIZE need each other"
        if self.disk_kv and config.parallel.num_ranks > 1:
            return f"--disk-kv: an engine of {config.parallel.num_ranks} workers has no disk tier; --host-kv-gib works"
        return ""

    def problem_with_states(self) -> tuple[str, str] | None:
        """States are on the device alone."""
        return ("--disk-kv", "which has no lower tier: pages alone are no start") if self.disk_kv else None

    def of_engine(self, number: int) -> Self:
        """With a folder of its own."""
        return replace(self, disk_kv=self.disk_kv and str(Path(self.disk_kv) / f"engine-{number}"))


PARTS = (DiskOptions,)
