"""Families of models: their chat templates' notations, and what such models write.

The templates are our own, in `families/*.jinja`: the marks, the order of parts and the quirks are those of the
published ones, their words are not.
"""

from pathlib import Path
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]

WEATHER: Call = ("get_weather", {"city": "Oslo"})
SEARCH: Call = ("search", {"query": "rain, [snow]", "days": 3})
THOUGHT, ANSWER = "Let me see.\nIt may rain.", "It rains <b>today</b>."


class Output(NamedTuple):
    """What a model writes behind the generation prompt, and what that means."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    variables: dict[str, Any] | None = None
    """The request's `chat_template_kwargs`."""


class Family(NamedTuple):
    """A family's ways of writing."""

    models: str
    tools: str | None
    """The name of its tool format; None: its template takes no tools."""
    reasoning: str | None
    prompt_end: str
    outputs: tuple[Output, ...]
    hides_calls: bool = False
    """The template writes no past calls."""

    def source(self, name: str) -> str:
        """The template."""
        return (Path(__file__).parent / "families" / f"{name}.jinja").read_text()


def _json(call: Call, key: str = "arguments") -> str:
    arguments = '{"city": "Oslo"}' if call is WEATHER else '{"query": "rain, [snow]", "days": 3}'
    return f'{{"name": "{call[0]}", "{key}": {arguments}}}'


_OSLO, _SNOW = '{"city": "Oslo"}', '{"query": "rain, [snow]", "days": 3}'
_ARRAY = f"[{_json(WEATHER)}, {_json(SEARCH)}]"
_HERMES = "".join(f"\n<tool_call>\n{_json(call)}\n</tool_call>" for call in (WEATHER, SEARCH))
_BOTH = (WEATHER, SEARCH)
_THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
_OPENED = f"{THOUGHT}\n</think>\n\n"
_OFF = {"enable_thinking": False}
_ON = {"enable_thinking": True}
_PLAIN = Output(ANSWER, content=ANSWER)
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=search>\n<parameter=query>\nrain, [snow]\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n"
)
_DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + _OSLO + "\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n" + _SNOW + "\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_OSLO}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{_SNOW}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">rain, [snow]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
_GLM = (
    "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    "\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>rain, [snow]</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
_MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
    '<invoke name="search">\n<parameter name="query">rain, [snow]</parameter>\n<parameter name="days">3</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
_SEED = (
    "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"
    "\n<seed:tool_call>\n<function=search>\n<parameter=query>rain, [snow]</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>"
)
_KIMI = (
    "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_OSLO}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{_SNOW}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
_ACTION = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + _OSLO + "},\n"
    '    {"tool_call_id": "1", "tool_name": "search", "parameters": ' + _SNOW + "}\n]<|END_ACTION|>"
)
_K3 = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="search" index="2"<|sep|><|open|>argument key="query" type="string"<|sep|>rain, [snow]'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
_K3_ANSWER = "<|open|>response<|sep|>{}<|close|>response<|sep|>"
_K3_END = "<|close|>message<|sep|>"
_SOLAR = (
    "<|tool_calls|>"
    f"<|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{_OSLO}<|tool_call:end|>"
    f"<|tool_call:begin|>a2<|tool_call:name|>search<|tool_call:args|>{_SNOW}<|tool_call:end|><|calls|>"
)
_GLIMMER = (
    ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">'
    "Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=search<|message|>"
    '<atem:function_calls>\n<atem:invoke name="search">\n<atem:parameter name="query">rain, [snow]</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
_NEXT = "<|eom|><|start|>assistant"
_M3 = (
    '<tool_call>\n@<invoke name="get_weather">@<city>Oslo@</city>@</invoke>\n'
    '@<invoke name="search">@<query>rain, [snow]@</query>@<days>3@</days>@</invoke>\n@</tool_call>'
).replace("@", "]<]minimax[>[")
_HY3 = (
    "<tool_calls@>\n<tool_call@>get_weather<tool_sep@>\n<arg_key@>city</arg_key@>\n<arg_value@>Oslo</arg_value@>\n"
    "</tool_call@>\n<tool_call@>search<tool_sep@>\n<arg_key@>query</arg_key@>\n<arg_value@>rain, [snow]</arg_value@>\n"
    "<arg_key@>days</arg_key@>\n<arg_value@>3</arg_value@>\n</tool_call@>\n</tool_calls@>"
).replace("@>", ":opensource>")
_PYTHONIC = "[get_weather(city='Oslo'), search(query='rain, [snow]', days=3)]"

FAMILIES: dict[str, Family] = {
    "kimi_k3": Family(
        "Kimi K3", "kimi_k3", "kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        (
            Output(f"{THOUGHT}<|close|>think<|sep|>{_K3_ANSWER.format(ANSWER)}{_K3_END}", THOUGHT, ANSWER),
            Output(f"{THOUGHT}<|close|>think<|sep|>{_K3_ANSWER.format('')}{_K3}{_K3_END}", THOUGHT, "", _BOTH),
            Output(f"<|close|>think<|sep|>{_K3_ANSWER.format('I look.')}{_K3}{_K3_END}", "", "I look.", _BOTH),
            Output(f"{ANSWER}<|close|>response<|sep|>{_K3_END}", "", ANSWER, (), _OFF),
        ),
    ),
    "solar_open": Family(
        "Solar Open", "solar_open", "solar_open", "<|begin|>assistant",
        (
            Output(f"<|think|>{THOUGHT}<|end|><|begin|>assistant<|content|>{ANSWER}<|end|>", THOUGHT, ANSWER),
            Output(f"<|content|>{ANSWER}<|end|>", "", ANSWER),
            Output(f"<|think|>{THOUGHT}<|end|><|begin|>assistant{_SOLAR}", THOUGHT, "", _BOTH),
            Output(f"<|content|>I look.<|end|><|begin|>assistant{_SOLAR}", "", "I look.", _BOTH),
        ),
    ),
    "glimmer": Family(
        "Muse Glimmer", "glimmer", "glimmer", "<|start|>assistant",
        (
            Output(f" to=self<|message|>{THOUGHT}{_NEXT} to=user<|message|>{ANSWER}", THOUGHT, ANSWER),
            Output(f" to=user<|message|>{ANSWER}<|eot|>", "", ANSWER),
            Output(f" to=self<|message|>{THOUGHT}{_NEXT}{_GLIMMER}", THOUGHT, "", _BOTH),
            Output(f" to=user<|message|>I look.{_NEXT}{_GLIMMER}", "", "I look.", _BOTH),
        ),
    ),
    "apriel": Family(
        "Apriel 1.6", "hunyuan", "apriel", "<|begin_assistant|>\nHere are my reasoning steps:\n",
        (
            Output(f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\n{ANSWER}\n[END FINAL RESPONSE]", THOUGHT, ANSWER),
            Output(f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\n<tool_calls>{_ARRAY}</tool_calls>", THOUGHT, "", _BOTH),
        ),
    ),
    "minimax_m3": Family(
        "MiniMax M3", "minimax_m3", "minimax_m3", "]~b]ai\n",
        (
            Output(f"<mm:think>{THOUGHT}</mm:think>{ANSWER}", THOUGHT, ANSWER),
            Output(f"</mm:think>I look.]<]minimax[>[{_M3}", "", "I look.", _BOTH),
            Output(f"<mm:think>{THOUGHT}</mm:think>]<]minimax[>[{_M3}", THOUGHT, "", _BOTH),
        ),
    ),
    "hy3": Family(
        "Hunyuan 3", "hy3", "hy3", "<hy_assistant>",
        (
            Output(f"<think:opensource>{THOUGHT}</think:opensource>{ANSWER}", THOUGHT, ANSWER),
            Output(f"<think:opensource></think:opensource>I look.{_HY3}", "", "I look.", _BOTH),
        ),
    ),
    "cohere_text": Family(
        "Command A 2", "command_r", "cohere_text", "<|CHATBOT_TOKEN|><|START_THINKING|>",
        (
            Output(f"{THOUGHT}<|END_THINKING|><|START_TEXT|>{ANSWER}<|END_TEXT|>", THOUGHT, ANSWER),
            Output(f"{THOUGHT}<|END_THINKING|>{_ACTION}", THOUGHT, "", _BOTH),
        ),
    ),
    "gpt_oss": Family(
        "gpt-oss", "harmony", "harmony", "<|start|>assistant",
        (
            Output(
                f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
                THOUGHT, ANSWER,
            ),
            Output(f"<|channel|>final<|message|>{ANSWER}<|return|>", "", ANSWER, (), {"reasoning_effort": "low"}),
            Output(
                f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>"
                "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
                f"<|message|>{_OSLO}<|call|>",
                THOUGHT, "I look.", (WEATHER,),
            ),
            Output(f" to=functions.search<|channel|>commentary json<|message|>{_SNOW}<|call|>", calls=(SEARCH,)),
        ),
    ),
    "deepseek_r1": Family(
        "DeepSeek R1", "deepseek_v3", "think", "<｜Assistant｜><think>\n",
        (Output(_OPENED + ANSWER, THOUGHT, ANSWER), Output(_OPENED + _DEEPSEEK_V3, THOUGHT, "", _BOTH)),
    ),
    "deepseek_v3": Family(
        "DeepSeek V3", "deepseek_v3", None, "<｜Assistant｜>", (_PLAIN, Output(_DEEPSEEK_V3, calls=_BOTH))
    ),
    "deepseek_v31": Family(
        "DeepSeek V3.1", "deepseek_v31", "think", "<｜Assistant｜></think>",
        (
            _PLAIN,
            Output(f"{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER, (), {"thinking": True}),
            Output(ANSWER + _DEEPSEEK_V31, "", ANSWER, _BOTH),
        ),
    ),
    "deepseek_v32": Family(
        "DeepSeek V3.2", "deepseek_v32", "think", "<｜Assistant｜><think>",
        (
            Output(f"{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER),
            Output(f"{ANSWER}\n\n{_DSML}", "", ANSWER, _BOTH, _OFF),
            Output(f"{THOUGHT}</think>\n\n{_DSML}", THOUGHT, "", _BOTH),
        ),
    ),
    "glm_4_5": Family(
        "GLM-4.5, GLM-4.6", "glm", "think", "<|assistant|>",
        (
            Output(f"\n<think>{THOUGHT}</think>\n{ANSWER}", THOUGHT, ANSWER),
            Output(f"\n<think>{THOUGHT}</think>{_GLM}", THOUGHT, "", _BOTH),
            Output(f"\n{ANSWER}{_GLM}", "", f"\n{ANSWER}", _BOTH, _OFF),
        ),
    ),
    "gemma3": Family(
        "Gemma 3", "gemma3", None, "<start_of_turn>model\n",
        (
            _PLAIN,
            Output(f"```tool_code\n{_PYTHONIC}\n```", calls=_BOTH),
            Output(f"```python\n{_PYTHONIC}\n```", calls=_BOTH),
            Output(f"I look.\n```json\n{_json(WEATHER)}\n```", "", "I look.", (WEATHER,)),
            Output("Such:\n```json\n{\"name\": \"other\"}\n```", "", "Such:\n```json\n{\"name\": \"other\"}\n```"),
            Output(_PYTHONIC, calls=_BOTH),
            Output(_json(WEATHER, "parameters"), calls=(WEATHER,)),
        ),
    ),
    "gemma4": Family(
        "Gemma 4", "gemma4", "gemma4", "<|turn>model\n<|channel>thought\n<channel|>",
        (
            _PLAIN,
            Output(f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}", THOUGHT, ANSWER, (), _ON),
            Output(
                f"<|channel>thought\n{THOUGHT}<channel|>"
                '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
                '<|tool_call>call:search{days:3,query:<|"|>rain, [snow]<|"|>}<tool_call|>',
                THOUGHT, "", _BOTH, _ON,
            ),
        ),
    ),
    "phi4": Family("Phi-4", None, None, "<|im_start|>assistant<|im_sep|>", (_PLAIN,)),
    "phi4_reasoning": Family(
        "Phi-4-reasoning", None, "think", "<|im_start|>assistant<|im_sep|>", (Output(_THINK + ANSWER, THOUGHT, ANSWER),)
    ),
    "phi4_mini": Family(
        "Phi-4-mini", "phi4_mini", None, "<|assistant|>",
        (
            _PLAIN,
            Output(f"<|tool_call|>{_ARRAY}<|/tool_call|>", calls=_BOTH),
            Output(f"<|tool_call|>{_json(WEATHER)}<|/tool_call|>", calls=(WEATHER,)),
            Output(f"functools{_ARRAY}", calls=_BOTH),
        ),
        hides_calls=True,
    ),
    "mistral_v7": Family(
        "Mistral Small 2409, Mistral Large 2411", "mistral", None, "[/INST]",
        (_PLAIN, Output(f"[TOOL_CALLS] {_ARRAY}", calls=_BOTH)),
    ),
    "mistral_v11": Family(
        "Mistral Small 3.1", "mistral_named", None, "[/INST]",
        (
            _PLAIN,
            Output(
                f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{_OSLO}[TOOL_CALLS]search[CALL_ID]a1B2c3D4f[ARGS]{_SNOW}",
                calls=_BOTH,
            ),
        ),
    ),
    "mistral_v13": Family(
        "Magistral, Ministral 3", "mistral_named", "mistral", "[/INST]",
        (
            Output(f"[THINK]{THOUGHT}[/THINK]{ANSWER}", THOUGHT, ANSWER),
            Output(
                f"[THINK]{THOUGHT}[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{_OSLO}[TOOL_CALLS]search[ARGS]{_SNOW}",
                THOUGHT, "I look.", _BOTH,
            ),
            Output(ANSWER, content=ANSWER),
        ),
    ),
    "granite_3_2": Family(
        "Granite 3.2", "granite", "granite", "<|start_of_role|>assistant<|end_of_role|>",
        (
            _PLAIN,
            Output(
                f"Here is my thought process:\n\n{THOUGHT}\n\nHere is my response:\n\n{ANSWER}", THOUGHT, ANSWER, (),
                {"thinking": True},
            ),
            Output(f"<|tool_call|>{_ARRAY}", calls=_BOTH),
        ),
    ),
    "granite_3_3": Family(
        "Granite 3.3", "granite", "think_response", "<|start_of_role|>assistant<|end_of_role|>",
        (
            _PLAIN,
            Output(
                f"<think>{THOUGHT}</think><response>{ANSWER}</response>", THOUGHT, ANSWER, (), {"thinking": True}
            ),
            Output(f"<tool_call>{_ARRAY}", calls=_BOTH),
        ),
    ),
    "granite_4": Family(
        "Granite 4", "hermes", None, "<|start_of_role|>assistant<|end_of_role|>",
        (_PLAIN, Output(f"I look.{_HERMES}", "", "I look.", _BOTH)),
    ),
    "command": Family(
        "Command R7B, Command A", "command_r", "command_r", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        (
            Output(f"<|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>", "", ANSWER),
            Output(
                f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
                THOUGHT, ANSWER,
            ),
            Output(f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>{_ACTION}", THOUGHT, "", _BOTH),
            Output(_ACTION, calls=_BOTH),
        ),
    ),
    "minimax_m2": Family(
        "MiniMax M2", "minimax_m2", "think", "]~b]ai\n<think>\n",
        (
            Output(_OPENED + ANSWER, THOUGHT, ANSWER),
            Output(f"{_OPENED}I look.\n{_MINIMAX}", THOUGHT, "I look.", _BOTH),
        ),
    ),
    "kimi_k2": Family(
        "Kimi K2", "kimi_k2", None, "<|im_assistant|>assistant<|im_middle|>",
        (_PLAIN, Output(f"I look.{_KIMI}", "", "I look.", _BOTH)),
    ),
    "kimi_k2_thinking": Family(
        "Kimi K2 Thinking", "kimi_k2", "think", "<|im_assistant|>assistant<|im_middle|>",
        (
            Output(f"<think>{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER),
            Output(f"<think>{THOUGHT}</think>{_KIMI}", THOUGHT, "", _BOTH),
        ),
    ),
    "seed_oss": Family(
        "Seed-OSS", "seed_oss", "seed_oss", "<seed:bos>assistant\n",
        (
            Output(f"<seed:think>{THOUGHT}</seed:think>{ANSWER}", THOUGHT, ANSWER),
            Output(f"<seed:think>{THOUGHT}</seed:think>{_SEED}", THOUGHT, "", _BOTH),
            Output(ANSWER, "", ANSWER, (), {"thinking_budget": 0}),
        ),
    ),
    "ernie_4_5_thinking": Family(
        "ERNIE 4.5 Thinking", "hermes", "think_response", "<|im_start|>assistant\n<think>\n",
        (
            Output(f"{_OPENED}<response>\n{ANSWER}\n</response>\n", THOUGHT, ANSWER),
            Output(f"{_OPENED}<response>\n{ANSWER}\n</response>\n\n{_HERMES}", THOUGHT, ANSWER, _BOTH),
            Output(f"{_OPENED}{_HERMES}", THOUGHT, "", _BOTH),
            Output(f"{_OPENED}{ANSWER}", THOUGHT, ANSWER),
        ),
    ),
    "hunyuan": Family(
        "Hunyuan", "hunyuan", "think_answer", "<｜hy_Assistant｜>",
        (
            Output(f"<think>\n{THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>", THOUGHT, ANSWER),
            Output(
                f"<think>\n{THOUGHT}\n</think>\n<answer>\n<tool_calls>{_ARRAY}</tool_calls>\n</answer>",
                THOUGHT, "", _BOTH,
            ),
            Output(ANSWER, "", ANSWER, (), _OFF),
        ),
    ),
    "exaone_4": Family(
        "EXAONE 4", "hermes", "think", "[|assistant|]<think>\n\n</think>\n\n",
        (
            _PLAIN,
            Output(_OPENED + _HERMES, THOUGHT, "", _BOTH, _ON),
            Output(_OPENED + ANSWER, THOUGHT, ANSWER, (), _ON),
        ),
    ),
    "smollm3": Family(
        "SmolLM3", "hermes", "think", "<|im_start|>assistant\n",
        (
            Output(_THINK + ANSWER, THOUGHT, ANSWER),
            Output(_THINK + _HERMES, THOUGHT, "", _BOTH),
            Output(ANSWER, "", ANSWER, (), _OFF),
        ),
    ),
    "qwen3": Family(
        "Qwen3", "hermes", "think", "<|im_start|>assistant\n",
        (
            Output(_THINK + ANSWER, THOUGHT, ANSWER),
            Output(f"{_THINK}I look.{_HERMES}", THOUGHT, "I look.", _BOTH),
            Output(ANSWER, "", ANSWER, (), _OFF),
        ),
    ),
    "nemotron_nano_2": Family(
        "Nemotron Nano 2", "nemotron", "think", "<SPECIAL_11>Assistant\n<think>\n",
        (
            Output(_OPENED + ANSWER, THOUGHT, ANSWER),
            Output(f"{_OPENED}<TOOLCALL>{_ARRAY}</TOOLCALL>", THOUGHT, "", _BOTH),
            Output(ANSWER, "", ANSWER, (), _OFF),
        ),
    ),
    "nemotron_3": Family(
        "Nemotron 3", "qwen3_coder", "think", "<|im_start|>assistant\n<think>\n",
        (
            Output(_OPENED + ANSWER, THOUGHT, ANSWER),
            Output(_OPENED + _CODER, THOUGHT, "", _BOTH),
            Output(ANSWER, "", ANSWER, (), _OFF),
        ),
    ),
    "olmo_3": Family(
        "OLMo 3", "olmo3", None, "<|im_start|>assistant\n",
        (
            _PLAIN,
            Output(
                '<function_calls>\nget_weather(city="Oslo")\nsearch(query="rain, [snow]", days=3)\n</function_calls>',
                calls=_BOTH,
            ),
        ),
    ),
    "olmo_3_think": Family(
        "OLMo 3 Think", None, "think", "<|im_start|>assistant\n<think>", (Output(_OPENED + ANSWER, THOUGHT, ANSWER),)
    ),
    "llama_4": Family(
        "Llama 4", "pythonic", None, "<|header_start|>assistant<|header_end|>\n\n",
        (
            _PLAIN,
            Output(_json(WEATHER, "parameters") + _json(SEARCH, "parameters"), calls=_BOTH),
            Output(f"<|python_start|>{_json(WEATHER, 'parameters')}<|python_end|>", calls=(WEATHER,)),
            Output(_PYTHONIC, calls=_BOTH),
        ),
    ),
    "llama_4_pythonic": Family(
        "Llama 4, pythonic", "pythonic", None, "<|header_start|>assistant<|header_end|>\n\n",
        (
            _PLAIN,
            Output(_PYTHONIC, calls=_BOTH),
            Output(f"<|python_start|>{_PYTHONIC}<|python_end|>", calls=_BOTH),
            Output("[1] a list, [2] another", "", "[1] a list, [2] another"),
        ),
    ),
}  # fmt: skip
