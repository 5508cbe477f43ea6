"""Small chat templates that write calls as models' own templates do: one for each tool format, and what writes so."""

import json

_HEAD = "{{ tools | tojson if tools }}{% for m in messages %}"
_TAIL = "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"


def _template(calls: str, *, content: str = "{{ m.content }}", start: str = "", end: str = "") -> str:
    """`calls` writes the call `c` (with `name` and `arguments`), `start` and `end` stand around all of them."""
    line = "{{ '\\n' }}" if calls.startswith("\n") else ""  # Jinja drops a line break behind a tag
    return (
        f"{_HEAD}{content}{{% if m.tool_calls %}}{_said(start)}{{% for tool_call in m.tool_calls %}}"
        f"{{% set c = tool_call.function %}}{line}{calls.removeprefix(line and chr(10))}{{% endfor %}}{_said(end)}"
        f"{{% endif %}}{_TAIL}"
    )


def _said(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


_COMMA = "{{ ', ' if not loop.last }}"
_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_PLAIN = "{{ v if v is string else v | tojson }}"
_PYTHON = (
    "{% macro literal(v) %}{% if v is string %}{{ v | tojson }}{% elif v is boolean or v is none %}"
    "{{ 'None' if v is none else ('True' if v else 'False') }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k | tojson }}: {{ literal(w) }}{{ ', ' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ literal(w) }}{{ ', ' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_KEYWORDS = "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ literal(v) }}" + _COMMA + "{% endfor %})"


def _gemma(quote: str) -> str:
    return (
        "{% macro literal(v) %}{% if v is string %}"
        + quote
        + "{{ v }}"
        + quote
        + "{% elif v is boolean or v is none %}"
        "{{ 'null' if v is none else ('true' if v else 'false') }}{% elif v is mapping %}{{ '{' }}"
        "{% for k, w in v | dictsort %}{{ k }}:{{ literal(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for w in v %}{{ literal(w) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% else %}{{ v }}{% endif %}{% endmacro %}"
    )


def _xml(name: str, parameter: str, end: str, *, between: str = "\n") -> str:
    return name + "{% for k, v in c.arguments.items() %}" + parameter + between + "{% endfor %}" + end


_DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
_DEEPSEEK_AROUND = {"start": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>"}

_KIND = (
    "{% macro kind(v) %}{% if v is string %}string{% elif v is boolean %}boolean{% elif v is none %}null"
    "{% elif v is number %}number{% elif v is mapping %}object{% else %}array{% endif %}{% endmacro %}"
)
_M3 = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, w in v.items() %}"
    "TOKEN<{{ k }}>{{ nested(w) }}TOKEN</{{ k }}>{% endfor %}"
    "{% elif v is string or v is number or v is none %}{{ v if v is string else v | tojson }}"
    "{% else %}{% for w in v %}TOKEN<item>{{ nested(w) }}TOKEN</item>{% endfor %}{% endif %}{% endmacro %}"
)

TEMPLATES: dict[str, str] = {
    "harmony": _template(
        "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
        "{{ c.arguments | tojson }}<|call|>",
        content="{{ '<|channel|>final<|message|>' + m.content + '<|end|>' if m.content }}",
    ),
    "mistral_named": _template("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "mistral": _template(_JSON + _COMMA, start="[TOOL_CALLS] [", end="]"),
    "deepseek_v32": _template(
        _xml(
            '\n<｜DSML｜invoke name="{{ c.name }}">\n',
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
            + _PLAIN
            + "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        start="\n\n<｜DSML｜function_calls>",
        end="\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": _template(
        _xml(
            '\n<｜DSML｜invoke name="{{ c.name }}">\n',
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
            + _PLAIN
            + "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        start="\n\n<｜DSML｜tool_calls>",
        end="\n</｜DSML｜tool_calls>",
    ),
    "deepseek_v3": _template(
        _DEEPSEEK.format("function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```")
        + "{{ '\n' if not loop.last }}",
        **_DEEPSEEK_AROUND,
    ),
    "deepseek_v31": _template(
        _DEEPSEEK.format("{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"), **_DEEPSEEK_AROUND
    ),
    "kimi_k2": _template(
        "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.arguments | tojson }}<|tool_call_end|>",
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "kimi_k3": _template(
        '<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in c.arguments.items() %}'
        '<|open|>argument key="{{ k }}" type="{{ kind(v) }}"<|sep|>' + _PLAIN + "<|close|>argument<|sep|>{% endfor %}"
        "<|close|>call<|sep|>",
        start="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
    ).replace(_HEAD, _KIND + _HEAD),
    "minimax_m3": _M3.replace("TOKEN", "]<]minimax[>[")
    + _template(
        ']<]minimax[>[<invoke name="{{ c.name }}">{{ nested(c.arguments) }}]<]minimax[>[</invoke>\n',
        start="]<]minimax[>[<tool_call>\n",
        end="]<]minimax[>[</tool_call>",
    ),
    "glimmer": _template(
        _xml(
            " to={{ c.name }}<|message|><atem:function_calls>\n" + '<atem:invoke name="{{ c.name }}">\n',
            '<atem:parameter name="{{ k }}">' + _PLAIN + "</atem:parameter>",
            "</atem:invoke>\n</atem:function_calls>{{ '<|eom|><|start|>assistant' if not loop.last }}",
        ),
        content="{{ ' to=user<|message|>' + m.content if m.content }}"
        "{{ '<|eom|><|start|>assistant' if m.content and m.tool_calls }}",
    ),
    "solar_open": _template(
        "<|tool_call:begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call:name|>{{ c.name }}<|tool_call:args|>"
        "{{ c.arguments | tojson }}<|tool_call:end|>",
        start="<|tool_calls|>",
        end="<|calls|>",
    ),
    "hy3": _template(
        _xml(
            "<tool_call:opensource>{{ c.name }}<tool_sep:opensource>\n",
            "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>" + _PLAIN
            + "</arg_value:opensource>",
            "</tool_call:opensource>\n",
        ),
        start="<tool_calls:opensource>\n",
        end="</tool_calls:opensource>",
    ),
    "minicpm5": _template(
        _xml(
            '<function name="{{ c.name }}">',
            '<param name="{{ k }}">' + _PLAIN + "</param>",
            "</function>{{ '\n' if not loop.last }}",
            between="",
        )
    ),
    "gigachat3": _template("<|message_sep|>\n\nfunction call<|role_sep|>\n" + _JSON),
    "gigachat": _template("<|function_call|>" + _JSON),
    "minimax_m2": _template(
        _xml('<invoke name="{{ c.name }}">\n', '<parameter name="{{ k }}">' + _PLAIN + "</parameter>", "</invoke>\n"),
        start="\n<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
    "seed_oss": _template(
        _xml(
            "\n<seed:tool_call>\n<function={{ c.name }}>\n",
            "<parameter={{ k }}>" + _PLAIN + "</parameter>",
            "</function>\n</seed:tool_call>",
        )
    ),
    "qwen3_coder": _template(
        _xml(
            "\n<tool_call>\n<function={{ c.name }}>\n",
            "<parameter={{ k }}>\n" + _PLAIN + "\n</parameter>",
            "</function>\n</tool_call>",
        )
    ),
    "glm": _template(
        _xml(
            "\n<tool_call>{{ c.name }}\n",
            "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _PLAIN + "</arg_value>",
            "</tool_call>",
        )
    ),
    "glm47": _template(
        _xml(
            "<tool_call>{{ c.name }}",
            "<arg_key>{{ k }}</arg_key><arg_value>" + _PLAIN + "</arg_value>",
            "</tool_call>",
            between="",
        )
    ),
    "gemma4": _gemma('<|"|>')
    + _template(
        "<|tool_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments | dictsort %}{{ k }}:"
        "{{ literal(v) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "function_gemma": _gemma("<escape>")
    + _template(
        "<start_function_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments | dictsort %}{{ k }}:"
        "{{ literal(v) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<end_function_call>"
    ),
    "gemma3": "{# <start_of_turn> [func_name1( #}" + _PYTHON
    + _template(_KEYWORDS + _COMMA, start="\n[", end="]"),
    "command_r": _template(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
        '"parameters": {{ c.arguments | tojson }}}'
        "{{ ',' if not loop.last }}\n",
        start="<|START_ACTION|>[\n",
        end="]<|END_ACTION|>",
    ),
    "command_r_plus": "{# directly-answer #}"
    + _template(
        '    {"tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{{ "," if not loop.last }}\n',
        start="Action:\n```json\n[\n",
        end="]```",
    ),
    "nemotron": _template(_JSON + _COMMA, start="\n\n<TOOLCALL>[", end="]</TOOLCALL>"),
    "apertus": _template(
        '{"{{ c.name }}": {{ c.arguments | tojson }}}' + _COMMA, start="<|tools_prefix|>[", end="]<|tools_suffix|>"
    ),
    "internlm": _template(
        '<|action_start|><|plugin|>\n{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|action_end|>\n'
    ),
    "lfm2": _PYTHON + _template(_KEYWORDS + _COMMA, start="<|tool_call_start|>[", end="]<|tool_call_end|>"),
    "olmo3": _PYTHON + _template(_KEYWORDS + "\n", start="<function_calls>\n", end="</function_calls>"),
    "functionary_v32": _template(
        ">>>{{ c.name }}\n{{ c.arguments | tojson }}", content="{{ '>>>all\n' + m.content if m.content }}"
    ),
    "functionary_v31": _template("<function={{ c.name }}>{{ c.arguments | tojson }}</function>"),
    "firefunction": "{# functools[...] #}" + _template(_JSON + _COMMA, start=" functools[", end="]"),
    "phi4_mini": _template(_JSON + _COMMA, start="<|tool_call|>[", end="]<|/tool_call|>"),
    "granite": "{# <|start_of_role|> #}" + _template(_JSON + _COMMA, start="<|tool_call|>[", end="]"),
    "hermes": _template("\n<tool_call>\n" + _JSON + "\n</tool_call>"),
    "minimax_m1": '{# <tool_calls>\\n{"name" #}'
    + _template(_JSON + "\n", start="<tool_calls>\n", end="</tool_calls>"),
    "hunyuan": _template(_JSON + _COMMA, start="<tool_calls>[", end="]</tool_calls>"),
    "pythonic": "{# [func_name1(params_name1=params_value1)] #}" + _PYTHON
    + _template(_KEYWORDS + _COMMA, start="\n[", end="]"),
    "llama3_json": "{# <|start_header_id|> #}"
    + _template(
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{{ "; " if not loop.last }}', start="\n"
    ),
    "generic": _template("\n" + _JSON),
}  # fmt: skip
