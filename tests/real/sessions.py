"""Sessions of coding agents, request by request, in the shape in which five of them write theirs.

Each is twenty requests or more: questions, and between them calls of tools, some of them two at once, and their
results. The texts are ours. Each of them has a word that occurs nowhere else (`Words`), so that a prompt can be
searched for what must be in it, once.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]

_SYLLABLES = ("ba", "do", "fe", "gu", "ki", "lo", "mu", "ne", "pi", "ra", "so", "tu", "va", "wo", "xi", "zu")
_FILLER = (
    "the gate of the lower basin opens only while the level above it is higher than the mark on the wall",
    "a change of one valve is written into the log together with the name of whoever turned it and the hour",
    "nobody edits a file that was not read before, because somebody else may have changed it in the meantime",
    "when a check fails, its first line says where, and everything that follows is seldom of any use",
    "paths are relative to the folder that the work began in, unless they begin with a slash or a tilde",
)


@dataclass
class Words:
    """Makes words that occur nowhere else, and remembers them."""

    seed: str
    made: list[str] = field(default_factory=list)
    _numbers: Iterator[tuple[str, ...]] = field(default_factory=lambda: product(_SYLLABLES, repeat=3))

    def word(self) -> str:
        word = f"{self.seed}{''.join(next(self._numbers))}"
        self.made.append(word)
        return word

    def text(self, num_sentences: int = 1) -> str:
        """Sentences; at the beginning and at the end stands a word of their own."""
        sentences = [f"{_FILLER[i % len(_FILLER)]}." for i in range(num_sentences)]
        return " ".join([self.word(), *sentences, self.word()])


@dataclass(frozen=True)
class Turn:
    """One request of a session, and what must be in its prompt."""

    body: Body
    shows: tuple[str, ...]  # each once
    thoughts: tuple[str, ...]  # of the model: templates leave out old ones
    question: str  # a word of the last message that a user wrote


@dataclass(frozen=True)
class Session:
    """What one client sends, and where."""

    path: str
    turns: tuple[Turn, ...]
    described: tuple[str, ...] = ()  # words of the tools, each at least once
    moves: str = ""  # with this word begins what this client itself moves from prompt to prompt, if it does


def _schema(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


_ROUNDS = ((1, 2, 1), (1,), (2, 1), (1, 1, 1), (), (1, 2), (1, 1, 1))
"""For each question the rounds of calls that the model makes before it answers, and how many each has."""


@dataclass
class _Story:
    """What happens in a session, whoever writes it down."""

    words: Words
    thoughts: Words
    calls_of: Callable[[int], tuple[str, dict[str, Any]]]
    _numbers: Iterator[int] = field(default_factory=count)

    def call(self) -> tuple[int, str, dict[str, Any]]:
        number = next(self._numbers)
        return number, *self.calls_of(number)

    def output(self, number: int) -> str:
        """What a tool says: some of it is long, some has marks of other languages, some is empty."""
        match number % 5:
            case 0:
                return self.words.text(8)
            case 1:
                return f'{{"output": "{self.words.word()}\\n$ \\u00e9", "metadata": {{"exit_code": 0}}}}'
            case 2:
                lines = f"     1\tdef {self.words.word()}() -> None:\n     2\t    return '<b>&amp;</b>'"
                return f"{lines}\n{self.words.word()}"
            case 3:
                return f"Exit code 1\n{self.words.word()}: “nicht gefunden” — 見つかりません"
            case _:
                return ""


# --- /v1/responses ---------------------------------------------------------------------------


def codex() -> Session:
    """Items: developer messages, the environment, reasoning, functions whose results are JSON; nothing is stored."""
    words, thoughts, described = Words("q"), Words("t"), Words("d")

    def calls_of(number: int) -> tuple[str, dict[str, Any]]:
        if number % 4 == 3:
            plan = [{"step": words.word(), "status": "in_progress"}, {"step": words.word(), "status": "pending"}]
            return "update_plan", {"explanation": words.word(), "plan": plan}
        command = ["bash", "-lc", f"rg -n '{words.word()}' src | head -{number}"]
        return "shell", {"command": command, "workdir": "/src", "timeout_ms": 10_000}

    story = _Story(words, thoughts, calls_of)
    strings = {"type": "array", "items": {"type": "string"}}
    step = _schema(
        {"step": {"type": "string"}, "status": {"type": "string", "description": "How far it is."}},
        "step",
        "status",
        additionalProperties=False,
    )
    shell = {
        "command": {**strings, "description": described.text()},
        "workdir": {"type": "string", "description": described.word()},
        "timeout_ms": {"type": "number"},
        "with_escalated_permissions": {"type": "boolean"},
        "justification": {"type": "string"},
    }
    plan = {
        "explanation": {"type": "string"},
        "plan": {"type": "array", "items": step, "description": described.word()},
    }

    def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "function",
            "name": name,
            "description": described.text(2),
            "strict": False,
            "parameters": parameters,
        }

    tools = [
        function("shell", _schema(shell, "command", additionalProperties=False)),
        function("update_plan", _schema(plan, "plan", additionalProperties=False)),
        function("view_image", _schema({"path": {"type": "string"}}, "path", additionalProperties=False)),
        function("list_mcp_resources", _schema({"server": {"type": "string"}, "cursor": {"type": "string"}})),
        function("mcp__tracker__find", {"type": "object", "properties": {}}),
        {"type": "web_search", "external_web_access": False},
    ]
    fields: Body = {
        "model": "m", "instructions": words.text(60), "tools": tools, "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199c3a0-5b51-7c03-9b4e",
        "text": {"verbosity": "medium"},
    }  # fmt: skip

    def message(role: str, text: str) -> Message:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    items = [
        message("developer", f"<permissions instructions>{words.text(4)}</permissions instructions>"),
        message("user", f"# AGENTS.md instructions for /src\n\n<INSTRUCTIONS>\n{words.text(10)}\n</INSTRUCTIONS>"),
        message(
            "user", f"<environment_context>\n  <cwd>/src</cwd>\n  <shell>{words.word()}</shell>\n</environment_context>"
        ),
    ]
    turns: list[Turn] = []
    question = ""

    def ask() -> None:
        turns.append(Turn({**fields, "input": [*items]}, (*words.made,), (*thoughts.made,), question))

    for rounds in _ROUNDS:
        question = words.word()
        items.append(message("user", f"{question} {words.text()}"))
        ask()
        for num_calls in rounds:
            thought = {"type": "summary_text", "text": f"**{thoughts.word()}**"}
            items.append({"type": "reasoning", "summary": [thought], "content": None, "encrypted_content": None})
            if num_calls == 1:
                items.append(message("assistant", words.text()))
            made = [story.call() for _ in range(num_calls)]
            for number, name, given in made:
                call = {
                    "name": name,
                    "arguments": json.dumps(given, ensure_ascii=False),
                    "call_id": f"call_{number:022}",
                }
                items.append({"type": "function_call", **call})
            for number, _, _ in made:
                output = story.output(number)
                items.append({"type": "function_call_output", "call_id": f"call_{number:022}", "output": output})
            ask()
        items.append(message("assistant", words.text(3)))
    return Session("/v1/responses", (*turns,), (*described.made,))


# --- /v1/messages ------------------------------------------------------------------------------


def claude_code() -> Session:
    """Blocks: cached system blocks after one that changes, reminders, thinking, two calls at once, errors."""
    words, thoughts, described = Words("q"), Words("t"), Words("d")

    def calls_of(number: int) -> tuple[str, dict[str, Any]]:
        match number % 3:
            case 0:
                return "Read", {"file_path": f"/src/{words.word()}.py", "offset": number, "limit": 2000}
            case 1:
                edit = {"old_string": f'def {words.word()}():\n\treturn "\'"', "new_string": f"# {words.word()}\n\\n"}
                return "Edit", {"file_path": f"/src/{words.word()}.py", **edit, "replace_all": False}
        todo = {"content": words.word(), "status": "pending", "activeForm": words.word()}
        return "TodoWrite", {"todos": [todo, {**todo, "content": words.word(), "activeForm": ""}]}

    story = _Story(words, thoughts, calls_of)
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}

    def tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
        return {"name": name, "description": described.text(6), "input_schema": _schema(properties, *required, **draft)}

    text = {"type": "string"}
    todo = _schema(
        {"content": {**text, "minLength": 1}, "status": {**text, "enum": ["pending", "done"]}, "activeForm": text},
        "content",
        "status",
        additionalProperties=False,
    )
    answers = {"type": "object", "propertyNames": text, "additionalProperties": text, "description": described.word()}
    lines = {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}
    tools = [
        tool(
            "Read",
            {"file_path": {**text, "description": described.word()}, "offset": lines, "limit": lines},
            "file_path",
        ),
        tool(
            "Edit",
            {
                "file_path": text,
                "old_string": text,
                "new_string": text,
                "replace_all": {"type": "boolean", "default": False},
            },
            "file_path",
            "old_string",
            "new_string",
        ),
        tool("TodoWrite", {"todos": {"type": "array", "items": todo}}, "todos"),
        tool(
            "AskUserQuestion",
            {"questions": {"type": "array", "items": {}, "minItems": 1}, "answers": answers},
            "questions",
        ),
        tool("Agent", {"model": {"anyOf": [{**text, "enum": ["small", "large"]}, {"type": "null"}]}}),
    ]
    cached = {"type": "ephemeral"}
    system = [words.text(2), words.text(70)]
    messages: list[Message] = []
    turns: list[Turn] = []
    question = ""

    def ask() -> None:
        head = (
            f"x-anthropic-billing-header: cc_version=2.1.0.{len(turns):03x}; cc_entrypoint=cli; cch={len(turns):05x};"
        )
        blocks: list[Message] = [{"type": "text", "text": head}]
        blocks += [{"type": "text", "text": each, "cache_control": cached} for each in system]
        *before, last = messages
        *parts, part = last["content"]
        body: Body = {
            "model": "m", "system": blocks, "tools": tools, "max_tokens": 32_000, "stream": True,
            "messages": [*before, {**last, "content": [*parts, {**part, "cache_control": cached}]}],
            "thinking": {"type": "enabled", "budget_tokens": 31_999}, "metadata": {"user_id": "user_00_session_00"},
        }  # fmt: skip
        turns.append(Turn(body, (*words.made,), (*thoughts.made,), question))

    for rounds in _ROUNDS:
        question = words.word()
        reminder = f"<system-reminder>\n{words.text(3)}\n</system-reminder>"
        asked = [{"type": "text", "text": each} for each in (reminder, f"{question} {words.text()}")]
        messages.append({"role": "user", "content": asked})
        ask()
        for num_calls in rounds:
            blocks: list[Message] = [{"type": "thinking", "thinking": thoughts.text(), "signature": ""}]
            if num_calls == 1:
                blocks.append({"type": "text", "text": words.text()})
            made = [story.call() for _ in range(num_calls)]
            blocks += [
                {"type": "tool_use", "id": f"toolu_{number:024}", "name": name, "input": given}
                for number, name, given in made
            ]
            messages.append({"role": "assistant", "content": blocks})
            results: list[Message] = []
            for number, _, _ in made:
                output = story.output(number)
                content: Any = [{"type": "text", "text": output}] if number % 2 else output
                failed = {"is_error": True} if number % 5 == 3 else {}
                results.append(
                    {"type": "tool_result", "tool_use_id": f"toolu_{number:024}", "content": content, **failed}
                )
            if num_calls == 2:
                results.append({"type": "text", "text": f"<system-reminder>{words.word()}</system-reminder>"})
            messages.append({"role": "user", "content": results})
            ask()
        messages.append({"role": "assistant", "content": [{"type": "text", "text": words.text(3)}]})
    return Session("/v1/messages", (*turns,), (*described.made,))


# --- /v1/chat/completions ----------------------------------------------------------------------


def _chat(
    words: Words,
    thoughts: Words,
    messages: list[Message],
    fields: Body,
    calls_of: Callable[[int], tuple[str, dict[str, Any]]],
    *,
    parts: bool,
) -> tuple[Turn, ...]:
    """The turns of a client that speaks in chats; with `parts`, its texts are lists of parts."""
    story, turns = _Story(words, thoughts, calls_of), list[Turn]()
    question = ""

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if parts else text

    def ask() -> None:
        turns.append(Turn({**fields, "messages": [*messages]}, (*words.made,), (*thoughts.made,), question))

    for rounds in _ROUNDS:
        question = words.word()
        messages.append({"role": "user", "content": content(f"{question} {words.text()}")})
        ask()
        for num_calls in rounds:
            calls: list[dict[str, Any]] = []
            for _ in range(num_calls):
                number, name, given = story.call()
                function = {"name": name, "arguments": json.dumps(given)}
                calls.append({"id": f"call_{number:024}", "type": "function", "function": function})
            said = words.text() if num_calls == 1 else None if parts else ""
            thought = {} if parts else {"reasoning_content": thoughts.text()}
            messages.append({"role": "assistant", "content": said, "tool_calls": calls, **thought})
            for call in calls:
                output = story.output(int(call["id"][5:]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content(output)})
            ask()
        messages.append({"role": "assistant", "content": words.text(3)})
    return (*turns,)


def _function(described: Words, name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": described.text(4)}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


def opencode() -> Session:
    """Two system messages, texts as strings, empty ones beside calls, reasoning; schemas with `$schema`."""
    words, thoughts, described = Words("q"), Words("t"), Words("d")
    text = {"type": "string"}
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}
    todos = {
        "type": "array",
        "items": _schema({"content": {**text, "description": "What is to be done."}, "id": text}, "content"),
    }
    edit = {"filePath": text, "oldString": text, "newString": text}
    kind = {"default": "text", "anyOf": [{"const": "text"}, {"const": "html"}]}
    tools = [
        _function(described, "bash", _schema({"command": text, "timeout": {"type": "number"}}, "command", **draft)),
        _function(described, "edit", _schema(edit, "filePath", **draft)),
        _function(described, "todowrite", _schema({"todos": todos}, "todos", **draft)),
        _function(described, "todoread", _schema({}, **draft)),
        _function(described, "webfetch", _schema({"url": {**text, "format": "uri"}, "format": kind}, "url")),
    ]

    def calls_of(number: int) -> tuple[str, dict[str, Any]]:
        match number % 3:
            case 0:
                return "bash", {"command": f"grep -rn '{words.word()}' . && echo \"$?\""}
            case 1:
                return "todowrite", {"todos": [{"content": words.word(), "id": str(number)}]}
        return "todoread", {}

    fields: Body = {
        "model": "m", "max_tokens": 32_000, "temperature": 0.3, "tools": tools, "tool_choice": "auto", "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    messages = [{"role": "system", "content": words.text(60)}, {"role": "system", "content": words.text(8)}]
    turns = _chat(words, thoughts, messages, fields, calls_of, parts=False)
    return Session("/v1/chat/completions", turns, (*described.made,))


def qwen_code() -> Session:
    """Texts as parts, null beside calls, tools of a service whose schemas name no type."""
    words, thoughts, described = Words("q"), Words("t"), Words("d")
    text = {"type": "string"}
    paths = {"type": "array", "items": {**text, "minLength": 1}, "description": described.word(), "default": []}
    flag = {"type": "boolean"}
    fact = {"fact": {**text, "description": described.word()}, "scope": {"enum": ["global", "project", None]}}
    anything = {"value": {}, "nested": {"properties": {"deep": {"type": ["string", "null"]}}}}
    tools = [
        _function(described, "read_many_files", _schema({"paths": paths, "recursive": flag}, "paths")),
        _function(described, "run_shell_command", _schema({"command": text, "is_background": flag}, "command")),
        _function(described, "save_memory", _schema(fact, "fact")),
        _function(described, "mcp_service_anything", {"type": "object", "properties": anything}),
        _function(described, "mcp_service_nothing", None),
    ]

    def calls_of(number: int) -> tuple[str, dict[str, Any]]:
        match number % 3:
            case 0:
                return "read_many_files", {"paths": [f"src/{words.word()}.ts", f"src/{words.word()}.ts"]}
            case 1:
                return "run_shell_command", {"command": f"npm test -- {words.word()}", "is_background": False}
        return "mcp_service_anything", {"value": {"deep": [words.word(), None, 1.5]}, "nested": {"deep": None}}

    fields: Body = {
        "model": "m", "tools": tools, "temperature": 0, "top_p": 1, "stream": True, "max_tokens": 8_192,
        "stream_options": {"include_usage": True}, "metadata": {"sessionId": "s-0", "promptId": "s-0########1"},
    }  # fmt: skip
    cached = {"type": "ephemeral"}
    messages: list[Message] = [
        {"role": "system", "content": [{"type": "text", "text": words.text(60), "cache_control": cached}]},
        {"role": "user", "content": [{"type": "text", "text": words.text(8)}]},
        {"role": "assistant", "content": [{"type": "text", "text": words.word()}]},
    ]
    turns = _chat(words, thoughts, messages, fields, calls_of, parts=True)
    return Session("/v1/chat/completions", turns, (*described.made,))


def aider() -> Session:
    """No tools: files stand in messages between the past talk and the question, and rules at both ends.

    So the files move behind whatever was talked before, with each question.
    """
    words = Words("q")
    system, rules = words.text(30), words.text(12)
    examples: list[Message] = []
    for _ in range(2):
        examples.append({"role": "user", "content": words.text(2)})
        examples.append({"role": "assistant", "content": f"{words.text()}\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE\n"})
    switched = {"role": "user", "content": words.text(2)}
    moved = words.word()
    files = f"{words.word()}.py\n```\nimport sys\n{words.text(25)}\n```\n"
    around = [
        {"role": "user", "content": f"{moved} {words.text()}\n\n{files}"},
        {"role": "assistant", "content": words.text()},
    ]
    past: list[Message] = []
    turns = []
    for _ in range(20):
        question = words.word()
        asked = {"role": "user", "content": f"{question} {words.text()}"}
        messages = [{"role": "system", "content": system}, *examples, switched, {"role": "assistant", "content": "Ok."}]
        messages += [*past, *around, asked, {"role": "system", "content": rules}]
        body = {"model": "m", "messages": messages, "temperature": 0, "stream": True, "max_tokens": 4_096}
        turns.append(Turn(body, (*words.made,), (), question))
        past += [
            asked,
            {
                "role": "assistant",
                "content": f"{words.text(2)}\n```python\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE\n```",
            },
        ]
    return Session("/v1/chat/completions", (*turns,), moves=moved)


SESSIONS: dict[str, Callable[[], Session]] = {
    "codex": codex,
    "claude code": claude_code,
    "opencode": opencode,
    "qwen code": qwen_code,
    "aider": aider,
}
