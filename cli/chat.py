"""`penstock chat`: talk to any OpenAI-compatible server in the terminal.

Ctrl-C stops the answer that is being written; at the prompt, Ctrl-C or Ctrl-D leaves.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from penstock.cli.engines import add_server_options, no_server
from penstock.config.parser import Parser

_PROMPT = "\001\033[1m\002> \001\033[0m\002"  # bold; \001 and \002 tell readline that the codes take no width

HELP = """/system TEXT   set the system message (empty: none)
/params K=V …  set sampling parameters, e.g. /params temperature=0.7 max_tokens=200
               (empty: show them; /params clear: back to the defaults)
/stats         time to first token, tokens per second and cached tokens of the last answer
/clear         forget the conversation
/quit          leave; so does Ctrl-D; Ctrl-C stops an answer"""


_COMMANDS = ("/system", "/params", "/stats", "/clear", "/help", "/quit", "/exit")
INTERRUPTED = 130
_KINDS: dict[str, type] = dict.fromkeys(
    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), float
) | dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed"), int)
"""Parameters that are numbers."""


class ChatError(Exception):
    """The server refused, or cannot be reached; the message is for the user."""


class Reasoning(str):
    """A piece of the model's reasoning before its answer; not kept in the history."""


@dataclass
class Stats:
    """Statistics of the last answer."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the statistics as one line."""
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
    """The messages so far, the parameters, and the server's address."""

    url: str
    model: str
    api_key: str = ""
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def answer(self, text: str) -> AsyncIterator[str]:
        """Send a user message; yields pieces of the answer, and keeps both in the history.

        The received part of an interrupted answer (Ctrl-C) stays in the history.

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
                    delta = choice.get("delta") or {}
                    thought, piece = delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")
                    if thought or piece:
                        self.stats.ttft_s = self.stats.ttft_s or time.monotonic() - started
                    if thought:
                        yield Reasoning(thought)
                    if piece:
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
                    if error := event.get("error"):
                        raise ChatError(str(error.get("message", error) if isinstance(error, dict) else error))
                    yield event
    except aiohttp.ClientConnectorError as error:
        raise ChatError(no_server(url.removesuffix("/v1/chat/completions"), error)) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatError(f"cannot reach {url}: {error}") from None
    except ValueError:
        raise ChatError(f"{url} does not answer with a chat stream") from None


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
    except aiohttp.ClientConnectorError as error:
        raise ChatError(no_server(url, error)) from None
    except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError) as error:
        raise ChatError(f"no model at {url}: {error}") from None


def command(line: str, conversation: Conversation) -> str | None:
    """Carry out a `/command`; return the text to show, or None to leave."""
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
            return _set_params(rest, conversation)
        case "/help" | "/?":
            return HELP
        case _:
            near = get_close_matches(name, _COMMANDS, n=1)
            return f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists the commands")


def _set_params(text: str, conversation: Conversation) -> str:
    if text.strip() == "clear":
        conversation.params = {}
    else:
        pairs = [pair.partition("=") for pair in text.split()]
        if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
            return f"{wrong[0] or '='!r} sets nothing: write name=value, as in temperature=0.7"
        try:
            conversation.params |= {key: _parameter(key, value) for key, _, value in pairs}
        except ValueError as error:
            return str(error)
    shown = " ".join(f"{key}={json.dumps(value)}" for key, value in conversation.params.items())
    return f"parameters: {shown or 'the defaults'}"


def _parameter(name: str, text: str) -> Any:
    """A parameter's value; servers have others than those known here.

    Raises:
        ValueError: it cannot be one; the message is for the user.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    kind = _KINDS.get(name)
    if kind is None:
        if near := get_close_matches(name, _KINDS, n=1, cutoff=0.85):
            raise ValueError(f"there is no parameter {name}; did you mean {near[0]}?")
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{name} is a {'whole ' * (kind is int)}number, not {text!r}")
    return value


def wrapped(text: str, style: str, console: Console) -> list[Text]:
    """The lines of a text, wrapped between words."""
    return [line for part in text.split("\n") for line in Text(part, style).wrap(console, console.width) or [Text()]]


async def _write_answer(console: Console, conversation: Conversation, text: str) -> None:
    line, style = "", ""
    with Live(console=console, auto_refresh=False) as growing:  # redraws only the last line
        async for piece in conversation.answer(text):
            if not console.is_terminal:
                console.out(piece, end="", highlight=False)
                continue
            if isinstance(piece, Reasoning) != (style == "dim"):
                line, style = line + "\n\n" * (style == "dim"), "" if style else "dim"
            *whole, last = wrapped(line + piece, style, console)
            for done in whole:
                console.print(done)
            line = last.plain
            growing.update(last, refresh=True)
    if not console.is_terminal:
        console.print()


def ask(conversation: Conversation, console: Console, prompt: str) -> int:
    """Print the answer to one prompt; return the exit code (1: there is none, 130: it was stopped)."""
    try:
        asyncio.run(_write_answer(console, conversation, prompt))
    except ChatError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def talk(conversation: Conversation, console: Console) -> int:
    """Read prompts and print answers until the user leaves; return the exit code."""
    if console.is_terminal:
        with suppress(ImportError):  # arrow keys: edit the line, recall earlier ones
            import readline  # noqa: F401
    name, place = escape(conversation.model), escape(conversation.url)
    console.print(f"[bold]{name}[/bold] [dim]at {place}; /help for commands, Ctrl-D to leave[/dim]\n")
    while True:
        try:
            line = input(_PROMPT if console.is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line.startswith("/"):
            shown = command(line, conversation)
            if shown is None:
                return 0
            console.print(f"{shown}\n", style="dim", markup=False, soft_wrap=True)
        elif line:
            try:
                asyncio.run(_write_answer(console, conversation, line))
            except KeyboardInterrupt:
                console.print("… (stopped)", style="dim")
            except ChatError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
            console.print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `penstock chat`; return the exit code."""
    parser = Parser("penstock chat", "Talk to a server in the terminal, Penstock's or any other with OpenAI's API.")
    add_server_options(parser)
    parser.add_argument("-m", "--model", default="", metavar="NAME", help="(default: the first that the server lists)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    arguments = parser.parse_args(argv)
    conversation = Conversation(
        arguments.url.rstrip("/").removesuffix("/v1"),
        arguments.model,
        arguments.api_key,
        arguments.system,
    )
    try:
        conversation.model = conversation.model or asyncio.run(first_model(conversation.url, conversation.headers()))
    except ChatError as error:
        print(f"penstock chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return talk(conversation, Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
