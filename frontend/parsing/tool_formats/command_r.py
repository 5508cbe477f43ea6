"""Command R7B and Command A: an array of objects between <|START_ACTION|> and <|END_ACTION|>."""

from penstock.frontend.parsing.calls.json_blocks import JsonArrays
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, repeated, sequence


class CommandR(JsonArrays):
    """The objects say `tool_name` and `parameters`, and number the calls."""

    name = "command_r"
    models = ("Command R7B", "Command A")
    example = (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]'
        "<|END_ACTION|>"
    )
    ends = (("<|START_ACTION|>", "<|END_ACTION|>"),)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<|START_ACTION|>" in template

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        number = sequence(quoted('    {"tool_call_id": "'), "/[0-9]+/", quoted('", '))
        calls = [
            sequence(
                quoted(f'"tool_name": {quoted(function.name)}, "parameters": '), rules.json(function.arguments), '"}"'
            )
            for function in functions
        ]
        call = rules.rule(sequence(number, f"({' | '.join(calls)})"))
        opening, closing, between = "[\n", "\n]", ",\n"
        return sequence(
            quoted(opening), repeated(call, between, parallel=parallel), quoted(closing), rules.mark("<|END_ACTION|>")
        )
