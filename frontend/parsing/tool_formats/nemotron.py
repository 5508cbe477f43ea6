"""Nemotron Nano 2 and Llama Nemotron: an array of objects between <TOOLCALL> and </TOOLCALL>."""

from penstock.frontend.parsing.calls.json_blocks import JsonArrays


class Nemotron(JsonArrays):
    """One block has all calls."""

    name = "nemotron"
    models = ("Nemotron Nano 2", "Llama Nemotron Super and Ultra")
    example = '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>'
    ends = (("<TOOLCALL>", "</TOOLCALL>"),)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<TOOLCALL>" in template
