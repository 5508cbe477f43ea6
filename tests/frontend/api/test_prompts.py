"""Prompts of embedding models, by the names that different clients give them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.clients.test_rerank import unit_of
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import error_of, post
from tests.frontend.live_server import LiveServer, live_server

PROMPTS = {"query": "wheel: ", "document": "", "passage": "gate: ", "classification": "river: "}


@pytest.fixture(scope="module")
def prompting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server of a model with prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "a.Normalize"}]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True, "max_seq_length": 12}))
    with live_server(folder, tmp_path_factory.mktemp("s")) as live:
        live.plays(lambda request, _: Script([0], pooled=unit_of(request)))
        yield live


def texts_asked(live: LiveServer, path: str, body: dict[str, Any]) -> list[str]:
    """What came to the engine."""
    live.do(live.scheduler.received.clear)
    assert post(live, path, body).status == 200
    requests = live.do(lambda: live.scheduler.added)
    return [live.tokenizer.decode(prompt_ids(request)) for request in requests]


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({}, ""),
        ({"prompt_name": "query"}, "wheel: "),
        ({"input_type": "search_query"}, "wheel: "),
        ({"input_type": "query"}, "wheel: "),
        ({"task": "retrieval.query"}, "wheel: "),
        ({"input_type": "search_document"}, "gate: "),
        ({"prompt_name": "document"}, ""),
        ({"task": "classification"}, "river: "),
    ],
)
def test_names(prompting: LiveServer, fields: dict[str, str], begin: str) -> None:
    assert texts_asked(prompting, "/v1/embeddings", {"input": ["water", "wind"], **fields}) == [
        f"{begin}water", f"{begin}wind",
    ]  # fmt: skip


def test_rerank_knows_queries_from_documents(prompting: LiveServer) -> None:
    asked = texts_asked(prompting, "/rerank", {"query": "water", "documents": ["wind", "pipe"]})
    assert asked == ["wheel: water", "gate: wind", "gate: pipe"]
    assert texts_asked(prompting, "/score", {"text_1": "water", "text_2": "wind"}) == ["water", "wind"]


def test_lower_case_and_length(prompting: LiveServer) -> None:
    """As sentence_bert_config.json says."""
    assert texts_asked(prompting, "/v1/embeddings", {"input": "WIND", "prompt_name": "query"}) == ["wheel: wind"]
    error = error_of(post(prompting, "/v1/embeddings", {"input": "gate " * 40}), 400)
    assert "12 tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_name": "other"}, "prompt_name"),
        ({"input_type": "clustering"}, "input_type"),
        ({"prompt_name": "query", "task": "classification"}, "prompt_name"),
        ({"prompt_name": "query", "input": [1, 2]}, "prompt_name"),
    ],
)
def test_refused(prompting: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(post(prompting, "/v1/embeddings", {"input": "a", **fields}), 400)["param"] == param


def test_a_model_without_prompts(live: LiveServer) -> None:
    """A kind of input is told in vain, which is said; a prompt that is named by itself must be there."""
    live.plays(lambda request, _: Script([0], pooled=unit_of(request)))
    answer = post(live, "/v1/embeddings", {"input": "a", "input_type": "query"})
    assert answer.status == 200
    assert "no prompts" in str(answer.headers)
    assert (
        "no prompts" in error_of(post(live, "/v1/embeddings", {"input": "a", "prompt_name": "query"}), 400)["message"]
    )
