"""What a frontend needs of the part that reads what outputs must match, and what happens without it."""

from dataclasses import dataclass

from penstock.frontend.errors import UnsupportedParameter
from penstock.frontend.parsing.parser import OutputFormat
from penstock.frontend.part import FrontendPart
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import ValidRequest
from penstock.frontend.validation.grammar import GrammarSource


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that can be used. The default accepts any text."""

    text: str = ""  # as the worker reads it
    num_bytes: int = 0  # of memory that the prepared grammar takes
    checked_schema: str = ""  # JSON: finished texts are checked against it; empty: no check
    warnings: tuple[str, ...] = ()  # for the client: what it accepts although it should not


class GrammarPart(FrontendPart):
    """Reads what outputs must match; at most one part does. This one, in its place, refuses all that ask for it."""

    def bound(self, common: ValidRequest, output_format: OutputFormat, tokenizer: TextTokenizer) -> ValidRequest:
        """A chat's request with the grammar of its whole output: reasoning, calls, and the form that it asks for.

        It is asked for if there is a form, or if the tools bind the output.

        Raises:
            InvalidParameter: the grammar would never let the output end.
            UnsupportedParameter: there is no such part.
        """
        if output_format.tools is not None and output_format.tools.is_forced:
            raise _refused("tool_choice", "a forced tool_choice")
        field = "tools" if common.grammar is None else common.grammar.field
        raise _refused(field, "a strict tool" if common.grammar is None else field)

    async def read(self, source: GrammarSource, client: str) -> Grammar:
        """The grammar as the worker reads it. The time is charged to `client`.

        Raises:
            UnsupportedParameter: it is not supported, or this model supports none, or there is no such part.
            InvalidParameter: it takes too much time or memory.
            Overloaded: too many requests are waiting.
        """
        raise _refused(source.field, source.field)

    async def mismatch(self, schema: str, text: str, client: str) -> str:
        """What is wrong with a finished text, in one sentence; empty if it matches the schema."""
        raise NotImplementedError


def _refused(field: str, what: str) -> UnsupportedParameter:
    why = "the part that makes outputs match is not installed"
    return UnsupportedParameter(f"{what} is not supported by this server: {why}", param=field)
