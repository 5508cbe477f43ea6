"""The bodies that clients of Cohere, Jina and vLLM send, answered by the servers of a decoder and of a classifier."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import ParallelOptions
from penstock.ipc.messages import AddRequest
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import chat, complete, error_of, get, post
from tests.frontend.live_server import LiveServer, live_server

QUERY = "water"
DOCUMENTS = ["The gate opens.", "Water runs down the pipe and turns the wheel.", "wheel"]


def unit_of(request: AddRequest) -> bytes:
    """Of length 1; its angle shows how long the text is."""
    share = min(len(prompt_ids(request)), 100) / 100
    return struct.pack("<2f", share, (1 - share * share) ** 0.5)


def lengths(live: LiveServer, *texts: str) -> list[float]:
    return [min(len(live.tokenizer.encode(text, add_special_tokens=True)), 100) / 100 for text in texts]


def cosines(live: LiveServer) -> list[float]:
    first, *others = lengths(live, QUERY, *DOCUMENTS)
    return [first * b + ((1 - first**2) * (1 - b**2)) ** 0.5 for b in others]


@pytest.fixture
def embedding(live: LiveServer) -> Iterator[LiveServer]:
    live.plays(lambda request, _: Script([0], pooled=unit_of(request)))
    yield live
    live.reset()


def classifier(checkpoint: Path, folder: Path, *classes: str) -> Path:
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    names = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(classes)},
    }
    (folder / "config.json").write_text(json.dumps(config | names | {"num_hidden_layers": 1, "num_attention_heads": 4}))
    return folder


@pytest.fixture(scope="module")
def classifying(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server of a model with two classes."""
    folder = classifier(checkpoint, tmp_path_factory.mktemp("classifier"), "bad", "good")
    with live_server(folder, tmp_path_factory.mktemp("s")) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<2f", 0.0, 1.0)))
        yield live


def test_cohere(embedding: LiveServer) -> None:
    """Its clients post to /v2/rerank, and read `results`, `id` and `meta`."""
    body = {"model": "test/model", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "max_tokens_per_doc": 4096}
    answer = post(embedding, "/v2/rerank", body).json()
    right = cosines(embedding)
    best = sorted(range(3), key=lambda i: -right[i])[:2]
    assert [each["index"] for each in answer["results"]] == best
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([right[i] for i in best], abs=1e-6)
    assert "document" not in answer["results"][0]
    assert answer["id"]
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    first = post(embedding, "/v1/rerank", body | {"documents": [{"text": each} for each in DOCUMENTS]}).json()
    assert [each["index"] for each in first["results"]] == best


def test_jina(embedding: LiveServer) -> None:
    """Its clients post to /v1/rerank, and read the documents, too."""
    body = {"model": "alias", "query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    for path in ("/v1/rerank", "/rerank"):
        answer = post(embedding, path, body).json()
        assert [each["document"]["text"] for each in answer["results"]] == [
            DOCUMENTS[each["index"]] for each in answer["results"]
        ]
        assert answer["model"] == "alias"
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


def test_vllm(embedding: LiveServer) -> None:
    """`/score` with one text or many on either side, and `/pooling`."""
    right = cosines(embedding)
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        answer = post(embedding, "/score", dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(right, abs=1e-6)
        assert {each["object"] for each in answer["data"]} == {"score"}
    answer = post(embedding, "/v1/score", {"text_1": [QUERY] * 2, "text_2": DOCUMENTS[:2]}).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(right[:2], abs=1e-6)
    answer = post(embedding, "/pooling", {"input": [QUERY, "wheel"]}).json()
    assert [each["data"][0] for each in answer["data"]] == pytest.approx(lengths(embedding, QUERY, "wheel"), abs=1e-6)
    answer = post(embedding, "/pooling", {"input": "wheel", "encoding_format": "base64"}).json()
    [share, _] = struct.unpack("<2f", base64.b64decode(answer["data"][0]["data"]))
    assert [share] == pytest.approx(lengths(embedding, "wheel"), abs=1e-6)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "another"}, "model"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "truncation_side": "left"}, "truncation_side"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/pooling", {}, "input"),
        ("/pooling", {"input": "a", "normalize": True, "use_activation": False}, "normalize"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/score", {"queries": ["a", ""], "text_2": ["b", "c"]}, "queries"),
    ],
)
def test_refused(embedding: LiveServer, path: str, fields: dict[str, Any], param: str) -> None:
    error = error_of(post(embedding, path, fields), 404 if param == "model" else 400)
    assert error["param"] == param


def test_a_document_is_cut_if_it_is_too_long(embedding: LiveServer) -> None:
    document = "wheel " * 3000
    assert post(embedding, "/rerank", {"query": "a", "documents": [document]}).status == 200
    assert "512 tokens" in error_of(post(embedding, "/score", {"text_1": "a", "text_2": document}), 400)["message"]
    post(embedding, "/rerank", {"query": "a", "documents": [document], "max_tokens_per_doc": 7})
    requests = embedding.do(lambda: embedding.scheduler.added)
    assert [len(prompt_ids(request)) for request in requests] == [1, 512, 1, 7]


def test_a_document_is_cut_by_its_bytes(embedding: LiveServer) -> None:
    """Its characters may be few enough, and its bytes too many."""
    assert post(embedding, "/rerank", {"query": "a", "documents": ["\N{PARTY POPPER}" * 4000]}).status == 200


def test_zeros_are_no_limits(embedding: LiveServer) -> None:
    """vLLM's clients send their defaults."""
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 0, "max_tokens_per_doc": 0}
    assert len(post(embedding, "/v1/rerank", body).json()["results"]) == len(DOCUMENTS)


def test_an_embedding_is_activated_by_its_normalization(embedding: LiveServer) -> None:
    assert post(embedding, "/pooling", {"input": "a", "use_activation": False}).status == 200
    assert post(embedding, "/pooling", {"input": "a", "use_activation": True}).status == 200
    poolings = [request.sampling.pooling for request in embedding.do(lambda: embedding.scheduler.added)]
    assert [pooling is not None and pooling.is_normalized for pooling in poolings] == [False, True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/pooling", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_stages_of_a_pipeline_pool_nothing(
    embedding: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    service = embedding.server.service
    config = replace(service.config, parallel=ParallelOptions(pipeline_parallel_size=2))
    monkeypatch.setattr(service, "config", config)
    assert "--pipeline-parallel-size" in error_of(post(embedding, path, body), 400)["message"]


def test_an_empty_text_is_named(embedding: LiveServer) -> None:
    error = error_of(post(embedding, "/score", {"text_1": "a", "text_2": ["b", ""]}), 400)
    assert error["message"].startswith("text_2[1] is empty")


def test_a_classifier(classifying: LiveServer) -> None:
    answer = post(classifying, "/classify", {"input": ["a", "b c"]}).json()
    assert [(each["index"], each["label"], each["num_classes"]) for each in answer["data"]] == [
        (0, "good", 2),
        (1, "good", 2),
    ]
    assert answer["data"][0]["probs"] == pytest.approx([0.268941, 0.731059], abs=1e-5)
    raw = post(classifying, "/v1/classify", {"input": "a", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == [0.0, 1.0]
    assert error_of(post(classifying, "/classify", {}), 400)["param"] == "input"


def test_a_model_without_tokens_has_no_chats(classifying: LiveServer) -> None:
    """Each route that generates says so; the others work."""
    responses = post(classifying, "/v1/responses", {"input": "a"})
    messages = post(classifying, "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    for answer in (chat(classifying), complete(classifying), responses, messages):
        assert answer.status == 404
        assert "sorts" in answer.text or "turns texts into classes" in answer.text
    assert "2 classes" in error_of(post(classifying, "/rerank", {"query": "a", "documents": ["b"]}), 404)["message"]
    assert "/classify" in error_of(post(classifying, "/v1/embeddings", {"input": "a"}), 404)["message"]
    assert get(classifying, "/v1/models").status == post(classifying, "/tokenize", {"prompt": "a"}).status == 200


def test_a_cross_encoder(checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What all pairs repeat must not make them many times larger than a body may be."""
    folder = classifier(checkpoint, tmp_path, "fits")
    with live_server(folder, tmp_path_factory.mktemp("s"), frontend={"max_body_bytes": 8192}) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<f", 0.0)))
        body = {"query": "a" * 2000, "documents": ["b"] * 10, "instruction": "judge"}
        answer = post(live, "/rerank", body)
        assert [each["relevance_score"] for each in answer.json()["results"]] == [0.5] * 10
        assert "instruction: no effect" in str(answer.headers)
        for more in ({"documents": ["b"] * 20}, {"query": "a", "instruction": "b" * 4000}):
            assert error_of(post(live, "/rerank", body | more), 400)["param"] == "documents"
