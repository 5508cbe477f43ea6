"""InternLM 2.5 and 3: an object between <|action_start|><|plugin|> and <|action_end|>."""

from penstock.frontend.parsing.calls.json_blocks import JsonBlocks
from penstock.frontend.parsing.calls.json_calls import objects_rule
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules

_END = "<|action_end|>"


class InternLm(JsonBlocks):
    """The objects say `parameters`."""

    name = "internlm"
    models = ("InternLM 2.5", "InternLM 3")
    example = '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>'
    ends = (("<|action_start|><|plugin|>", _END),)
    separator = "\n"

    def __init__(self) -> None:
        super().__init__()
        self.marks = ("<|action_start|>", "<|plugin|>", _END)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return "<|plugin|>" in template

    @property
    def text_ends(self) -> tuple[str, ...]:
        """The marks that cannot be in a text around calls."""
        return self.marks[:1]

    def start_rule(self, rules: Rules) -> str:
        """The grammar of what opens a block."""
        return f"{rules.mark('<|action_start|>')} {rules.mark('<|plugin|>')}"

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        return f"{NEW_LINE} {objects_rule(rules, functions, arguments_key='parameters')} {rules.mark(_END)}"
