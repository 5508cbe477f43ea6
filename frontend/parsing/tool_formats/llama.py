"""Llama 3: JSON objects; small models write calls in Python's syntax all the same."""

from penstock.frontend.parsing.calls.block import Block, Reading
from penstock.frontend.parsing.calls.format import Schemas
from penstock.frontend.parsing.calls.rules import Function
from penstock.frontend.parsing.tool_formats.json_blocks import BareObjects, read_bare_objects
from penstock.frontend.parsing.tool_formats.pythonic import beginning_of_list, begins_with_object, read_list


class Llama3Json(BareObjects):
    """Objects with the key `parameters`, and ';' between them. Without the mark they must name offered tools.

    A list of calls in Python's syntax is read, too: Llama 3.2 writes it under a template that asks for objects.
    """

    name = "llama3_json"
    models = ("Llama 3.1", "Llama 3.2", "Llama 3.3")
    example = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    taught_by = ("<|python_tag|>", "<|start_header_id|>")
    ends = (("<|python_tag|>", ""),)
    separator = "; "
    arguments_key = "parameters"

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        if (yield from begins_with_object(block)):
            yield from read_bare_objects(block, known_only=not mark)
        else:
            yield from read_list(block, schemas, known_only=not mark)

    def beginning(self, functions: list[Function]) -> str:
        return rf"({super().beginning(functions)}|{beginning_of_list(functions)})"
