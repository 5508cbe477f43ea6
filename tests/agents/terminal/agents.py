"""Coding agents for terminals: how each is told where the server is, and how it calls its tool that writes files."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.families import QWEN
from tests.agents.scripted_server import MODEL
from tests.agents.terminal.installed import Package

FILE, TEXT = "quince.txt", "Quinces are ripe in October.\n"
TASK = f"Write one line about quinces into {FILE}."
DONE = "The line about quinces is written."
TITLE = "Quinces"
KEY = "none"
KEPT_REQUESTS = "requests"
"""The folder in the cache where what the agents ask for is kept."""


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        says: what the model answers to the task: a call of one of its tools, or a text in its format for edits.
        offers: a piece of the prompt that shows that this answer is meant; other requests want a title, and the like.
        then: what the model says when the tool has done its work.
        prints: what the agent shows the user at the end.
        num_requests: how many it needs at least.
        command: the words after the program's path, for a server's URL and the folder to work in. Settings are
            written into the folder `home`, beside it.
        variables: of the environment, beside `HOME`.
    """

    name: str
    package: Package
    says: str
    offers: str
    command: Callable[[str, Path], list[str]]
    variables: Callable[[str, Path], dict[str, str]]
    then: str = DONE
    prints: str = DONE
    num_requests: int = 2


def _calls(name: str, **arguments: Any) -> str:
    return QWEN.say(calls=[(name, arguments)])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _codex(url: str, home: Path) -> list[str]:
    provider = f'name = "Penstock"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    _write(
        home / "config.toml",
        f'model = "{MODEL}"\nmodel_provider = "penstock"\n[model_providers.penstock]\n{provider}',
    )
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]


def _cline(url: str, home: Path) -> list[str]:
    settings = {"provider": "openai-compatible", "apiKey": KEY, "model": MODEL, "baseUrl": f"{url}/v1"}
    providers = {"openai-compatible": {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z"}}
    known = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": providers}
    _write(home / "settings" / "providers.json", json.dumps(known))
    return ["--data-dir", str(home), "-P", "openai-compatible", "-m", MODEL, TASK]


def _opencode(url: str, home: Path) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL}},
    }
    settings = {"provider": {"penstock": provider}, "autoupdate": False, "share": "disabled"}
    _write(home / "opencode.json", json.dumps(settings))
    return ["run", "--model", f"penstock/{MODEL}", TASK]


def _pi(url: str, home: Path) -> list[str]:
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [{"id": MODEL}]}
    _write(home / "models.json", json.dumps({"providers": {"penstock": provider}}))
    return ["--provider", "penstock", "--model", MODEL, "--offline", "--print", TASK]


AGENTS = (
    Agent(
        "codex",
        Package("npm", "@openai/codex", "0.171.0", "codex"),
        _calls("exec_command", cmd=f"printf '{TEXT.strip()}\\n' > {FILE}"),
        '"name": "exec_command"',
        _codex,
        lambda url, home: {"CODEX_HOME": str(home)},
    ),
    Agent(
        "claude",
        Package("npm", "@anthropic-ai/claude-code", "2.1.332", "claude"),
        _calls("Write", file_path=f"WORK/{FILE}", content=TEXT),
        '"name": "Write"',
        lambda url, home: ["--print", TASK, "--model", MODEL, "--permission-mode", "acceptEdits"],
        lambda url, home: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "CLAUDE_CONFIG_DIR": str(home),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        "opencode",
        Package("npm", "opencode-ai", "1.18.33", "opencode"),
        _calls("write", filePath=f"WORK/{FILE}", content=TEXT),
        '"name": "write"',
        _opencode,
        lambda url, home: {"OPENCODE_CONFIG": str(home / "opencode.json")},
    ),
    Agent(
        "qwen-code",
        Package("npm", "@qwen-code/qwen-code", "0.24.4", "qwen"),
        _calls("write_file", file_path=f"WORK/{FILE}", content=TEXT),
        '"name": "write_file"',
        lambda url, home: ["--yolo", "--auth-type", "openai", TASK],
        lambda url, home: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
    ),
    Agent(
        "cline",
        Package("npm", "cline", "3.0.65", "cline"),
        _calls("editor", path=f"WORK/{FILE}", new_text=TEXT),
        '"name": "editor"',
        _cline,
        lambda url, home: {},
    ),
    Agent(
        "pi",
        Package("npm", "@mariozechner/pi-coding-agent", "0.73.1", "pi"),
        _calls("write", path=FILE, content=TEXT),
        '"name": "write"',
        _pi,
        lambda url, home: {"PI_CODING_AGENT_DIR": str(home)},
    ),
    Agent(
        "aider",
        Package("pip", "aider-chat", "0.86.2", "aider"),
        f"{FILE}\n```\n{TEXT}```\n",
        "file listing",
        lambda url, home: [
            "--model",
            f"openai/{MODEL}",
            "--openai-api-base",
            f"{url}/v1",
            "--openai-api-key",
            KEY,
            "--yes-always",
            "--no-git",
            "--edit-format",
            "whole",
            "--no-show-model-warnings",
            "--no-check-update",
            "--analytics-disable",
            "--message",
            TASK,
            FILE,
        ],
        lambda url, home: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        prints=f"Applied edit to {FILE}",
        num_requests=1,
    ),
    Agent(
        "mini",
        Package("pip", "mini-swe-agent", "2.4.6", "mini"),
        _calls("bash", command=f"printf '{TEXT.strip()}\\n' > {FILE}"),
        '"name": "bash"',
        lambda url, home: ["--model", f"openai/{MODEL}", "--task", TASK, "--yolo", "--exit-immediately"],
        lambda url, home: {
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(home),
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        then=_calls("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        prints="Exit",
    ),
)


def environment(agent: Agent, url: str, home: Path) -> dict[str, str]:
    """The variables that the agent gets: nothing of the user's, who may have accounts and settings of his own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE", "TERM") if name in os.environ}
    return kept | {"HOME": str(home), "CI": "1", "NO_COLOR": "1"} | agent.variables(url, home)
