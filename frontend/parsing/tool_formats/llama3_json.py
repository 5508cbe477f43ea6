"""Llama 3: calls are bare JSON objects, perhaps behind <|python_tag|>."""

from penstock.frontend.parsing.calls.block import Block, Reading
from penstock.frontend.parsing.calls.format import Schemas
from penstock.frontend.parsing.calls.json_blocks import BareObjects, read_bare_objects


class Llama3Json(BareObjects):
    """Objects with `parameters`, with ';' between them. Without the mark they must be calls of offered tools."""

    name = "llama3_json"
    models = ("Llama 3.1", "Llama 3.2", "Llama 3.3")
    example = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    ends = (("<|python_tag|>", ""),)
    separator = "; "
    arguments_key = "parameters"

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<|python_tag|>" in template or "<|start_header_id|>" in template

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read calls."""
        yield from block.skip()
        yield from read_bare_objects(block, known_only=not mark)
