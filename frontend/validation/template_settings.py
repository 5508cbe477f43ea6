"""What a request sets in the chat template: `chat_template_kwargs`, `reasoning_effort`, `verbosity`.

Clients send these to every model. What a template does not read cannot change the answer: it is left out, and said.
"""

from typing import Any

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.text.chat_template import RESERVED, ChatTemplate

MAX_TEMPLATE_VARIABLES = 32

_FIELD = "chat_template_kwargs"
_THINKING = ("enable_thinking", "thinking")
"""Names under which templates that know no effort switch reasoning on and off."""


def with_fields(variables: dict[str, Any] | None, **fields: str | None) -> dict[str, Any] | None:
    """The request's variables and those of its fields that are set; what a variable says goes before its field."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, **(variables or {})} if given else variables


def settings_for(template: ChatTemplate, variables: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The variables that this template reads, and warnings of those that it does not.

    An effort is passed on where the template reads one; else it says whether to reason at all, if that can be said.

    Raises:
        InvalidParameter: if there are too many, or one is no plain value or no variable of any template.
    """
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidParameter(
            f"{_FIELD} may hold {MAX_TEMPLATE_VARIABLES} entries at most, got {len(variables)}", param=_FIELD
        )
    known = template.extra_variables
    settings: dict[str, Any] = {}
    warnings = []
    for name, value in variables.items():
        if name in known:
            settings[name] = _plain(name, value)
        elif name in RESERVED:
            raise InvalidParameter(f"{_FIELD}.{name} cannot be set: it is no variable of a chat template", param=_FIELD)
        elif name == "verbosity":
            if value != "medium":  # which is to say nothing
                warnings.append("verbosity: no effect, this model's chat template does not read it")
        elif name != "reasoning_effort":
            listed = ", ".join(sorted(known)) or "none"
            warnings.append(f"{_FIELD}.{name[:64]}: no effect, this model's chat template reads: {listed}")
    effort = variables.get("reasoning_effort")
    if effort is not None:
        switch = next((name for name in _THINKING if name in known), None)
        if switch is not None and ("reasoning_effort" not in known or effort == "none"):
            settings.setdefault(switch, effort != "none")
        elif "reasoning_effort" not in known:
            warnings.append("reasoning_effort: no effect, this model's chat template does not read it")
    return settings, tuple(warnings)


def _plain(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise InvalidParameter(f"{_FIELD}.{name} must be a text, a number or a boolean", param=_FIELD)
    return value
