"""Hermes: each call is a JSON object between tags."""

from penstock.frontend.parsing.calls.json_blocks import JsonBlocks
from penstock.frontend.parsing.calls.json_calls import objects_rule
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules


class Hermes(JsonBlocks):
    """<tool_call>, an object, </tool_call>; several calls are several such blocks."""

    name = "hermes"
    models = ("Hermes 2 and 3", "Qwen2.5", "Qwen3", "QwQ", "SmolLM3", "Granite 4", "EXAONE 4", "ERNIE 4.5")
    example = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ends = (("<tool_call>", "</tool_call>"),)
    separator = "\n"

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<tool_call>" in template

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        return f"{NEW_LINE} {objects_rule(rules, functions)} {NEW_LINE} {rules.mark('</tool_call>')}"
