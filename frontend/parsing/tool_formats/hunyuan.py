"""Hunyuan and Jamba: an array of objects between <tool_calls> and </tool_calls>."""

from penstock.frontend.parsing.calls.json_blocks import JsonArrays


class Hunyuan(JsonArrays):
    """One block has all calls."""

    name = "hunyuan"
    models = ("Hunyuan A13B", "Jamba 1.5 to 1.7")
    example = '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>'
    ends = (("<tool_calls>", "</tool_calls>"),)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<tool_calls>" in template and "<tool_call>" not in template
