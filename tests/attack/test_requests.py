"""Requests that are well-formed HTTP and JSON, and far too large, or made to meet each other in the engine.

Single fields with single bad values are in tests/frontend/api/test_refusals.py, grammars in grammars/test_grammars.py
there, templates in text/test_template_bounds.py; none of that is repeated. Here is what would cost a server its memory
or time.
"""

import http.client
import json
import threading
import time
from typing import Any

import pytest

from tests.attack.after_check import CANARY, Victim, tells_nothing
from tests.faults.soak import sized

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "x"}]
MAX_MODEL_LEN = 2048

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("c1-sequences", TEXT, {"n": 10**9}),
    ("c2-prompts", TEXT, {"prompt": ["x"] * 1_000_000}),
    ("c2-token-lists", TEXT, {"prompt": [[5]] * 1_000_000}),
    ("c3-tokens", TEXT, {"prompt": [5] * 1_000_000}),
    ("c3-a-token-outside", TEXT, {"prompt": [1 << 31]}),
    ("c4-stops", TEXT, {"stop": ["x"] * 100_000}),
    ("c4-a-long-stop", TEXT, {"stop": "x" * 5_000_000}),
    ("c5-biases", TEXT, {"logit_bias": {str(i): 1 for i in range(100_000)}}),
    ("c5-logprobs", TEXT, {"logprobs": 10**6}),
    ("c5-bad-words", TEXT, {"bad_words": ["x"] * 1_000_000}),
    ("c7-min-tokens", TEXT, {"min_tokens": 131_072, "max_tokens": None}),
    ("c9-longer-than-the-context", TEXT, {"prompt": [5] * 100 * MAX_MODEL_LEN}),
    ("c10-salt", TEXT, {"cache_salt": "x" * 5_000_000}),
    *(
        (f"d1-{text!r}", TEXT, {"prompt": text * (512 * 1024)})
        for text in ("x", "-", " ", "\u0e01", "\u200d", "\u0301")
    ),
    ("d4-template-variables", CHAT, {"chat_template_kwargs": {str(i): i for i in range(100_000)}}),
    ("d5-messages", CHAT, {"messages": HELLO * 200_000}),
    ("d5-calls", CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 100_000}]}),
    ("d5-parts", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}]}),
    ("d5-tools", CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 100_000}),
    ("e1-pattern", TEXT, {"structured_outputs": {"regex": "a" * 5_000_000}}),
    ("e2-values", TEXT, {"structured_outputs": {"json": {"enum": list(range(500_000))}}}),
    ("e2-choices", TEXT, {"structured_outputs": {"choice": ["x"] * 500_000}}),
]


@pytest.mark.parametrize(("row", "path", "fields"), ROWS, ids=[row[0] for row in ROWS])
def test_too_much_is_refused_at_once(server: Victim, row: str, path: str, fields: dict[str, Any]) -> None:
    base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    body = json.dumps({**base, "max_tokens": 4, **fields}, ensure_ascii=False).encode()
    began = time.monotonic()
    answer = server.post(path, body)
    assert answer[0] == 400, answer
    assert '"error"' in answer[1]
    assert tells_nothing(answer[1], server)
    assert time.monotonic() - began < 40


def test_c9_exactly_as_long_as_the_context(server: Victim) -> None:
    assert server.post(TEXT, {"prompt": [5] * (MAX_MODEL_LEN - 1), "max_tokens": 1, "ignore_eos": True})[0] == 200


def test_d1_legal_texts_delay_nobody(server: Victim) -> None:
    """As many bytes as are tokenized at all, of what makes tokenizers slow; a canary beside each."""
    longest = MAX_MODEL_LEN * 16
    began = time.monotonic()
    assert server.post(TEXT, CANARY) == server.canary
    alone = time.monotonic() - began
    for text in ("^", "x", " ", "\u0e01", "\U0001f9d1\u200d"):
        body = {"prompt": text * (longest // len(text.encode())), "max_tokens": 1}
        thread = threading.Thread(target=server.post, args=(TEXT, body))
        thread.start()
        began = time.monotonic()
        assert server.post(TEXT, CANARY) == server.canary
        assert time.monotonic() - began < 5 + 20 * alone
        thread.join()


def test_e3_many_small_schemas(server: Victim) -> None:
    for i in range(sized(20, 5_000)):
        schema = {"type": "object", "properties": {f"a{i}": {}}}
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 2, "response_format": response_format})[0] == 200


def test_i5_requests_that_call_themselves_the_same(server: Victim) -> None:
    """The name that a client gives its request is a label: two of one name do not meet."""
    expected = [server.post(TEXT, {**CANARY, "prompt": f"Number {i}"})[1] for i in range(8)]
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json", "X-Request-Id": "the-same"}
        connection.request("POST", TEXT, json.dumps({**CANARY, "prompt": f"Number {i}"}), headers)
        answer = connection.getresponse()
        assert answer.headers["x-request-id"] == "the-same"
        answers[i] = json.loads(answer.read())["choices"][0]["text"]
        connection.close()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(8)] == expected
