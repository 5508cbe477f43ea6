"""Its options."""

from typing import Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.engines import numbered_file
from penstock.config.groups.base import Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions


class ToyOptions(PartOptions, frozen=True):
    """A part for tests."""

    part: ClassVar[str] = "toy"
    title: ClassVar[str] = "Toy"
    beside: ClassVar[str] = "frontend"

    toy_word: Annotated[
        str, Meta(description="What GET /toy says."), Shown("WORD", "what GET /toy says", ("--game-word",))
    ] = "hello"
    toy_times: Annotated[int, Meta(description="How often it says so.", ge=1, le=9)] = 1
    toy_names: Annotated[tuple[str, ...], Meta(description="To whom it says so."), Shown("NAME")] = ()
    toy_file: Annotated[str, Meta(description="A file for nothing. Empty: none."), Shown("PATH")] = ""

    def problem(self, config: Config) -> str:
        """A word without letters says nothing."""
        return "" if self.toy_word.isalpha() else f"--toy-word {self.toy_word!r} has other characters than letters"

    def of_engine(self, number: int) -> Self:
        """With a file of its own."""
        return replace(self, toy_file=numbered_file(self.toy_file, number))


PARTS = (ToyOptions,)
