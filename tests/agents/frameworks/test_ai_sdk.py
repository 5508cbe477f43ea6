"""Vercel's AI SDK, in Node.js: its provider for compatible servers, and OpenAI's own for both APIs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agents.script import ANSWER, AS_OBJECT, NEXT_ANSWER, NEXT_QUESTION, QUESTION, REPORT, TIME, WEATHER

FOLDER = Path(__file__).parents[1] / "javascript"


def run(url: str, *questions: str, **options: Any) -> list[dict[str, Any]]:
    given = {"url": url, "questions": questions, "weather": WEATHER, "time": TIME, "form": False, **options}
    command = ["node", "loop.mjs", json.dumps(given)]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    turns: list[dict[str, Any]] = json.loads(ended.stdout)
    return turns


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("provider", ["compatible", "chat", "responses"])
def test_a_loop_of_two_turns(url: str, provider: str, strict: bool, stream: bool) -> None:
    first, second = run(url, QUESTION, NEXT_QUESTION, provider=provider, strict=strict, stream=stream)
    assert (first["text"], first["called"]) == (ANSWER, ["get_weather", "get_time"])
    assert (second["text"], sorted(second["called"])) == (NEXT_ANSWER, ["get_time", "get_weather"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("provider", ["compatible", "chat", "responses"])
def test_an_output_type(url: str, provider: str, strict: bool, stream: bool) -> None:
    [turn] = run(url, f"{QUESTION} {AS_OBJECT}", provider=provider, strict=strict, stream=stream, form=True)
    assert (turn["object"], turn["called"]) == (REPORT, ["get_weather", "get_time"])
