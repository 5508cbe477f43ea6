"""Options that parts bring: a group of their own for each part, which nothing outside of the part names.

A part lists its group as `PARTS` in its `options.py`. Its fields are options like those of `groups/`: flags,
variables, help and docs are made from them in the same way.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from penstock.config.groups.base import Options
from penstock.config.parts import brought

if TYPE_CHECKING:
    from penstock.config.options import Config


class PartOptions(Options, frozen=True, omit_defaults=True):
    """The options of a part. It overrides the methods that it needs; each is asked before anything starts."""

    part: ClassVar[str]
    """The part's name."""

    title: ClassVar[str]
    """Above these options in the help."""

    beside: ClassVar[str]
    """The group of `Config` beside which these options stand: a command that takes that group takes them, too."""

    apart_only: ClassVar[frozenset[str]] = frozenset()
    """Names of options that have no effect on an engine in the caller's process (`LLM`)."""

    @property
    def writes_at_end(self) -> bool:
        """Whether an ending engine still has something to write, and so gets more time."""
        return False

    @property
    def measured_files(self) -> tuple[str, ...]:
        """Files of what was served, which `penstock simulate --measured` can read; "" among them is none."""
        return ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of further models in the API, which the part makes of the served one."""
        return ()

    @property
    def processor_names(self) -> tuple[str, ...]:
        """Names of logits processors that requests may ask for."""
        return ()

    @property
    def reads_no_images(self) -> bool:
        """Whether models that see need not, because no request will hold an image."""
        return False

    def problem(self, config: "Config") -> str:
        """Why these values cannot work, beyond the bounds of one field; "" if they can. It begins with the flag."""
        return ""

    def problem_with_states(self) -> tuple[str, str] | None:
        """The flag that cannot be used with a model whose layers keep a state of each row, and why, if there is one.

        The reason is read after "layers of MODEL keep a state of each row, ".
        """
        return None

    def of_engine(self, number: int) -> Self:
        """The options of one of several engines, each of which has its own files."""
        return self

    def check_files(self) -> None:
        """Make sure that files can be written, and folders exist.

        Raises:
            ConfigError: naming the file and the system's reason.
        """


def part_options() -> dict[str, type[PartOptions]]:
    """The groups of all parts, by the name of the part."""
    return {kind.part: kind for kind in brought("options", PartOptions)}
