"""The tools of one request."""

from dataclasses import dataclass
from typing import Any

from penstock.frontend.parsing.calls.format import ToolFormat


@dataclass(frozen=True, slots=True)
class ValidTools:
    """The tools that the model may call in this request."""

    definitions: list[dict[str, Any]]  # as the client wrote them: what the chat template shows
    names: frozenset[str]
    parallel: bool
    tool_format: ToolFormat
    is_forced: bool = False
    """The output must be calls, of the tools in `names`."""

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions of the tools in `names`."""
        return [tool["function"] for tool in self.definitions if tool["function"]["name"] in self.names]

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments."""
        return {function["name"]: function.get("parameters") or {} for function in self.functions}

    @property
    def has_strict(self) -> bool:
        """Some tool's arguments must match their schema whenever it is called."""
        return any(tool["function"].get("strict") for tool in self.definitions)
