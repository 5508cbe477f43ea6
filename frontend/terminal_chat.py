"""`penstock chat`: talk to any OpenAI-compatible server in the terminal.

Ctrl-C stops the answer that is being written; at the prompt, Ctrl-C or Ctrl-D leaves.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8000"

HELP = """/system TEXT   set the system message (empty: none)
/params K=V …  set sampling parameters, e.g. /params temperature=0.7 max_tokens=200 (empty: show)
/stats         time to first token, tokens per second and cached tokens of the last answer
/clear         forget the conversation
/quit          leave"""


class ChatError(Exception):
    """The server refused, or cannot be reached; the message is for the user."""


@dataclass
class Stats:
    """Of the last answer."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """One line for people."""
        if not self.usage:
            return "no answer yet"
        num_tokens = self.usage.get("completion_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        rate = (num_tokens - 1) / (self.total_s - self.ttft_s) if num_tokens > 1 and self.total_s > self.ttft_s else 0.0
        return (
            f"first token after {self.ttft_s * 1000:.0f} ms, {rate:.1f} tokens/s, {num_tokens} tokens; "
            f"prompt {self.usage.get('prompt_tokens', 0)} tokens, {cached} of them cached"
        )


@dataclass
class Conversation:
    """What is sent: messages so far, parameters, and where to."""

    url: str
    model: str
    api_key: str = ""
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)

    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def answer(self, text: str) -> AsyncIterator[str]:
        """Send a user message; yields pieces of the answer, and keeps both in the history.

        An answer that is cut short (Ctrl-C) stays in the history as far as it came.

        Raises:
            ChatError: if the server refuses or cannot be reached.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": system + asked, "stream": True} | self.params
        body["stream_options"] = {"include_usage": True}
        self.stats = Stats()
        pieces: list[str] = []
        started = time.monotonic()
        try:
            async for event in _events(f"{self.url}/v1/chat/completions", body, self.headers()):
                self.stats.usage = event.get("usage") or self.stats.usage
                for choice in event.get("choices", ()):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece:
                        self.stats.ttft_s = self.stats.ttft_s or time.monotonic() - started
                        pieces.append(piece)
                        yield piece
        finally:
            self.stats.total_s = time.monotonic() - started
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


async def _events(url: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise ChatError(_error_text(await response.text(), response.status))
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    if "error" in event:
                        raise ChatError(str(event["error"].get("message", event["error"])))
                    yield event
    except aiohttp.ClientError as error:
        raise ChatError(f"cannot reach {url}: {error}") from None


def _error_text(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {body[:200]}"


async def first_model(url: str, headers: dict[str, str]) -> str:
    """The first model that the server lists.

    Raises:
        ChatError: if it cannot be reached or lists none.
    """
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise ChatError(_error_text(await response.text(), response.status))
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, KeyError, IndexError, ValueError) as error:
        raise ChatError(f"no model at {url}: {error}") from None


def command(line: str, conversation: Conversation) -> str | None:
    """Carry out a `/command`; the text to show, or None to leave."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return None
        case "/clear":
            conversation.messages = []
            return "forgotten"
        case "/system":
            conversation.system = rest.strip()
            return f"system message: {conversation.system or 'none'}"
        case "/stats":
            return conversation.stats.text()
        case "/params":
            for pair in rest.split():
                key, _, value = pair.partition("=")
                try:
                    conversation.params[key] = json.loads(value)
                except ValueError:
                    conversation.params[key] = value
            return f"parameters: {conversation.params or 'the defaults'}"
        case _:
            return HELP


async def _write_answer(console: Console, conversation: Conversation, text: str) -> None:
    async for piece in conversation.answer(text):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)


def talk(conversation: Conversation, console: Console) -> int:
    """The loop of prompt and answer; the exit code."""
    console.print(f"[dim]{conversation.model} at {conversation.url}; /help for commands, Ctrl-D to leave[/dim]")
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line.startswith("/"):
            shown = command(line, conversation)
            if shown is None:
                return 0
            console.print(shown, style="dim", markup=False)
        elif line:
            try:
                asyncio.run(_write_answer(console, conversation, line))
            except KeyboardInterrupt:
                console.print(" …", style="dim", end="")
            except ChatError as error:
                console.print(str(error), style="red", markup=False, end="")
            console.print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `penstock chat`; the exit code."""
    parser = argparse.ArgumentParser(prog="penstock chat", description="Talk to a server in the terminal.")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--model", default="", help="model name (default: the first that the server lists)")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    arguments = parser.parse_args(argv)
    conversation = Conversation(
        arguments.url.rstrip("/").removesuffix("/v1"), arguments.model, arguments.api_key, arguments.system
    )
    try:
        conversation.model = conversation.model or asyncio.run(first_model(conversation.url, conversation.headers()))
    except ChatError as error:
        print(f"penstock chat: {error}", file=sys.stderr)
        return 1
    return talk(conversation, Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
