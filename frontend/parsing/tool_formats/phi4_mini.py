"""Phi-4-mini: objects between <|tool_call|> and <|/tool_call|>, or an array behind `functools`."""

from penstock.frontend.parsing.calls.json_blocks import JsonArrays


class Phi4Mini(JsonArrays):
    """Both ways are read."""

    name = "phi4_mini"
    models = ("Phi-4-mini",)
    example = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>'
    ends = (
        ("<|tool_call|>", "<|/tool_call|>"),
        ("functools", ""),
    )

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<|/tool_call|>" in template or ("<|tool|>" in template and "<|/tool|>" in template)
