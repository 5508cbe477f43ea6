"""The token that begins texts: a prompt has it once, whoever writes it."""

from collections.abc import Iterator

import pytest
from tokenizers import processors

from tests.frontend.checkpoint_folder import byte_level_tokenizer, write_checkpoint
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, chat, complete, post
from tests.frontend.live_server import LiveServer, live_server

BOS = "<s>"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its tokenizer adds the token, and its template writes it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([BOS])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    folder = tmp_path_factory.mktemp("begins")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_checkpoint(folder, tokenizer=tokenizer, chat_template=template)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"bos_token": null', f'"bos_token": "{BOS}"'))
    with live_server(folder, tmp_path_factory.mktemp("s")) as server:
        yield server


def num_begins(live: LiveServer, token_ids: list[int] | None = None) -> int:
    ids = list(prompt_ids(live.scheduler.added[-1])) if token_ids is None else token_ids
    return ids.count(live.tokenizer.bos_token_id or -1)


@pytest.mark.parametrize(
    ("prompt", "fields", "num"),
    [
        ("Hello", {}, 1),
        (f"{BOS}Hello", {}, 1),
        (f"{BOS}Hello{BOS}", {}, 2),
        (f"{BOS}{BOS}Hello", {}, 2),
        ("Hello", {"add_special_tokens": False}, 0),
        (f"{BOS}Hello", {"add_special_tokens": False}, 1),
        (f"{BOS}{BOS}Hello", {"add_special_tokens": False}, 2),
    ],
)
def test_completions(live: LiveServer, prompt: str, fields: dict[str, bool], num: int) -> None:
    assert complete(live, prompt, **fields).status == 200
    assert num_begins(live) == num
    tokens = post(live, "/tokenize", {"prompt": prompt} | fields).json()["tokens"]
    assert num_begins(live, tokens) == num


def test_chats(live: LiveServer) -> None:
    assert chat(live).status == 200
    assert num_begins(live) == 1
    assert chat(live, messages=[{"role": "user", "content": f"{BOS}Hello"}]).status == 200  # plain text, as all text is
    assert num_begins(live) == 1
    tokens = post(live, "/tokenize", {"messages": HELLO, "add_special_tokens": True}).json()["tokens"]
    assert num_begins(live, tokens) == 1
