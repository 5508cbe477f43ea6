"""Granite 3: an array of objects behind <|tool_call|> or <tool_call>."""

from penstock.frontend.parsing.calls.json_blocks import JsonArrays


class Granite(JsonArrays):
    """Nothing closes the array but its own bracket; some versions write a tag."""

    name = "granite"
    models = ("Granite 3.0 to 3.3",)
    example = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    ends = (
        ("<|tool_call|>", ""),
        ("<tool_call>", ""),
    )

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<|tool_call|>" in template and "<|start_of_role|>" in template
