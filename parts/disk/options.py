"""Options of the disk tier."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions, part_options

_HOST = "host"
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+")


class DiskOptions(PartOptions, frozen=True):
    """KV pages in files ([tiers](kv-tiers.md))."""

    part: ClassVar[str] = "disk"
    title: ClassVar[str] = "Disk"
    beside: ClassVar[str] = "worker"

    disk_kv: Annotated[
        str,
        Meta(
            description="Folder for KV pages of prefixes that are long or were used again, and the most disk space for "
            "this model's, such as /var/kv:50 for 50 GiB: they survive a restart. The files reveal prompts to whoever "
            "can read them. Empty: none."
        ),
        Shown("PATH:GIB", "folder for KV pages that survive a restart, and its size"),
    ] = ""

    @property
    def tier(self) -> tuple[Path, float] | None:
        """The folder of the disk tier and its size in GiB; None without one.

        Raises:
            ValueError: --disk-kv is not FOLDER:GIB.
        """
        if not self.disk_kv:
            return None
        folder, _, size = self.disk_kv.rpartition(":")
        if not folder or not _SIZE.fullmatch(size) or not float(size):
            raise ValueError("it must be FOLDER:GIB, such as /var/kv:50 for 50 GiB")
        return Path(folder), float(size)

    @property
    def writes_at_end(self) -> bool:
        """The scheduler lets the worker write the pages worth keeping."""
        return bool(self.disk_kv)

    def problem(self, config: Config) -> str:
        """A folder has a size, and one worker."""
        try:
            tier = self.tier
        except ValueError as error:
            return f"--disk-kv {self.disk_kv!r}: {error}"
        if tier and _HOST not in part_options():
            return f"--disk-kv: the part {_HOST!r} is missing, through whose pages those of the disk come and go"
        if tier and config.parallel.num_ranks > 1:
            return f"--disk-kv: an engine of {config.parallel.num_ranks} workers has no disk tier; --host-kv-gib works"
        return ""

    def problem_with_states(self) -> tuple[str, str] | None:
        """States are on the device alone."""
        return ("--disk-kv", "which has no lower tier: pages alone are no start") if self.disk_kv else None

    def of_engine(self, number: int) -> Self:
        """With a folder of its own."""
        folder, _, size = self.disk_kv.rpartition(":")
        return replace(self, disk_kv=self.disk_kv and f"{Path(folder) / f'engine-{number}'}:{size}")


PARTS = (DiskOptions,)
