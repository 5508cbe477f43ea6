"""The format for templates that teach no known one: the usual marks, and bare objects."""

from penstock.frontend.parsing.calls.block import Block, Reading
from penstock.frontend.parsing.calls.format import Schemas
from penstock.frontend.parsing.tool_formats.json_blocks import BareObjects, read_bare_objects
from penstock.frontend.parsing.tool_formats.mistral import Mistral


class Generic(BareObjects):
    """Objects between any of the usual marks, or of offered tools at the start of a line."""

    name = "generic"
    models = ("any other",)
    example = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    taught_by = ("",)  # any template that teaches no other format
    ends = (
        ("<tool_call>", "</tool_call>"),
        ("<function_call>", "</function_call>"),
        ("<|tool_call|>", ""),
        ("<|python_tag|>", ""),
        ("[TOOL_CALLS]", ""),
    )
    separator = "\n"

    def __init__(self) -> None:
        super().__init__()
        self._mistral = Mistral()

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        if mark == "[TOOL_CALLS]":
            yield from self._mistral.read(block, mark, schemas)
        elif not mark or mark == "<|python_tag|>":
            yield from block.skip()
            yield from read_bare_objects(block, known_only=not mark)
        else:
            yield from super().read(block, mark, schemas)
