"""Twenty turns of five coding agents on published templates: every text is in the prompt once, and what was sent before
is found in the prefix cache.

The model is small and random, with a trained model's tokenizer, to which the marks of the templates are added.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.frontend.schema import CHAT
from penstock.frontend.text.chat_template import Rendered
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.frontend.validation.chat import ValidChat, validate_chat
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.anthropic.frontend.schema import MESSAGES
from penstock.parts.anthropic.frontend.validate import validate_messages
from penstock.parts.responses.frontend.schema import RESPONSES
from penstock.parts.responses.frontend.validate import input_items, validate_response
from tests.e2e.checkpoints import make_checkpoint
from tests.e2e.servers import Server, serving
from tests.real.fetched import only_real, smollm2, the_file
from tests.real.learned import SOURCES, SPECIAL_TOKENS, learned, rules_of
from tests.real.sessions import SESSIONS, Body, Session

pytestmark = only_real

PAGE = 16
SLACK = 48
"""Tokens at a prompt's end that the next prompt need not have: the beginning of an answer, and the joint."""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="


Cut = Callable[[str, int], int]
"""From a prompt and the place of its last question to the place from which on the next prompt is another one."""


class Rewrites(NamedTuple):
    """What a template itself changes of what it wrote before."""

    reason: str
    by_question: Cut  # when a new question comes
    by_result: Cut | None = None  # when results come


def behind(mark: str) -> Cut:
    """From this mark behind the question."""
    return lambda text, question: text.index(mark, question)


def tools_of_mistral(text: str, question: int) -> int:
    """From the tools, which stand before the last question; without tools, nothing changes."""
    place = text.find("[AVAILABLE_TOOLS]")
    return place if place >= 0 else len(text)


_FORGETS = "it leaves out what was thought before the last question"
TEMPLATES: dict[str, Rewrites | None] = {
    "Qwen3.5-4B": Rewrites(_FORGETS, behind("<|im_start|>assistant")),
    "openai-gpt-oss-120b": Rewrites(_FORGETS, behind("<|start|>assistant")),
    "meta-llama-Llama-3.3-70B-Instruct": None,
    "deepseek-ai-DeepSeek-V3.1": None,
    "Mistral-Small-3.2-24B-Instruct-2506": Rewrites(
        "its tools stand before the last question, and it shows one text in a turn, which moves to the turn's end",
        tools_of_mistral,
        behind("[/INST]"),
    ),
}
"""The templates with which the sessions are served, and where their prompts cannot begin with the prompt before."""


@cache
def session(client: str) -> Session:
    return SESSIONS[client]()


def rendered(name: str, path: str, body: Body) -> Rendered:
    """The prompt that a server with this template makes of a request."""
    template, _, model = learned(name)
    rules, data = rules_of(name), json.dumps(body)
    valid: ValidChat
    if path == "/v1/responses":
        request = RESPONSES.decode(data)
        valid = validate_response(request, rules, template, [], input_items(request.input)).chat
    elif path == "/v1/messages":
        valid = validate_messages(MESSAGES.decode(data), rules, model).chat
    else:
        valid = validate_chat(CHAT.decode(data), rules, template)
    return template.render_conversation(valid.conversation)


@pytest.mark.parametrize("name", SOURCES)
def test_every_text_is_in_the_prompt_once(name: str) -> None:
    """In the middle of each session, and at its end."""
    wrong = {}
    for client in SESSIONS:
        given = session(client)
        for turn in (given.turns[7], given.turns[-1]):
            text = rendered(name, given.path, turn.body).text
            counts = {word: text.count(word) for word in turn.shows}
            counts |= {word: text.count(word) for word in turn.thoughts if word in text}
            odd = {word: count for word, count in counts.items() if count != 1}
            odd |= {word: 0 for word in given.described if word not in text}
            if odd:
                wrong[client] = odd
    assert wrong == {}


# --- served ------------------------------------------------------------------------------------

_MARK = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]|</?[a-z_]{3,20}>")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokenizer has a token for each mark of the templates."""
    folder = tmp_path_factory.mktemp("sessions") / "model"
    folder.mkdir()
    tokenizer = Tokenizer.from_buffer(open_checkpoint(the_file(smollm2)).tokenizer())
    marks = sorted({mark for name in TEMPLATES for mark in _MARK.findall(SOURCES[name])} | {*SPECIAL_TOKENS.values()})
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    make_checkpoint(folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1 << 17)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS))
    return folder


class Usage(NamedTuple):
    """Tokens of a prompt, and those of them that were cached."""

    prompt: int
    cached: int


async def ask(http: aiohttp.ClientSession, server: Server, path: str, body: Body) -> Usage:
    """Send a request as it is, but for the length of its answer, and with its usage told."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = body | {limit: 2} | ({"stream_options": {"include_usage": True}} if "chat" in path else {})
    usage: dict[str, Any] = {}
    async with http.post(f"{server.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert event.get("type") not in ("error", "response.failed"), event
                told = event.get("usage") or event.get("response", event.get("message", {})).get("usage")
                usage |= told or {}
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return Usage(usage["input_tokens"] + cached, cached)
    if path == "/v1/responses":
        return Usage(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


async def play(http: aiohttp.ClientSession, server: Server, tokenizer: TextTokenizer, name: str, client: str) -> None:
    """One session, turn by turn: what each prompt shares with the one before is found in the cache."""
    given, rewrites = session(client), TEMPLATES[name]
    texts = [rendered(name, given.path, turn.body).text for turn in given.turns]
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    usages = [await ask(http, server, given.path, turn.body) for turn in given.turns]
    assert [usage.prompt for usage in usages] == [len(ids) for ids in tokens]
    for at, (one, other) in enumerate(pairwise(given.turns)):
        shared = sum(takewhile(bool, map(eq, tokens[at], tokens[at + 1])))
        assert usages[at + 1].cached >= (shared // PAGE - 1) * PAGE, (client, at)
        places = [len(texts[at])]
        if given.moves:
            places.append(texts[at].index(given.moves))
        cut = rewrites and (rewrites.by_question if one.question != other.question else rewrites.by_result)
        if cut:
            places.append(cut(texts[at], texts[at].index(one.question)))
        kept = len(tokenizer.encode(texts[at][: min(places)], add_special_tokens=False))
        assert shared >= kept - SLACK, (client, at, shared, kept, len(tokens[at]))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_sessions_are_served_from_the_cache(name: str, checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(SOURCES[name])
    flags = ("--served-model-name", "m", "--dtype", "float32", "--num-pages", "12288", "--chat-template", template)
    tokenizer = load_tokenizer(open_checkpoint(checkpoint))
    async with serving(checkpoint, *flags) as server, aiohttp.ClientSession() as http:
        for client in SESSIONS:
            await play(http, server, tokenizer, name, client)
        await refuses_images(http, server)
        await server.settled(http)


async def refuses_images(http: aiohttp.ClientSession, server: Server) -> None:
    """A model without eyes says so, in each API, and goes on."""
    address = f"data:image/png;base64,{PIXEL}"
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    parts: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"type": "image_url", "image_url": {"url": address}},
        "/v1/responses": {"type": "input_image", "image_url": address},
        "/v1/messages": {"type": "image", "source": source},
    }
    for path, part in parts.items():
        field = "input" if path == "/v1/responses" else "messages"
        body = {"model": "m", "max_tokens": 1, field: [{"role": "user", "content": [part]}]}
        async with http.post(f"{server.url}{path}", json=body) as response:
            said = await response.json()
            assert response.status == 400, said
            assert re.search("images|only parts of type 'text'|'input_text' only", said["error"]["message"]), said
