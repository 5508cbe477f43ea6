"""The bodies that clients of Cohere and of text-embeddings-inference send for vectors, scores and classes."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.engine.link import Place
from penstock.ipc.messages import AddRequest
from penstock.parts.scores.frontend.templates import TEMPLATES
from tests.frontend.clients.test_rerank import classifier
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import error_of, post
from tests.frontend.live_server import LiveServer, live_server

NUMBERS = [0.5, -0.5, 0.25, 0.0, -1.0, 1.0, 0.0, 2.0, 3.0]
TEXTS = ["water", "The gate opens."]


def prompts(live: LiveServer) -> list[list[int]]:
    return [prompt_ids(request) for request in live.do(lambda: live.scheduler.added)]


@pytest.fixture
def vectors(live: LiveServer) -> Iterator[LiveServer]:
    """Each vector is the same."""
    live.plays(lambda request, _: Script([0], pooled=struct.pack("<9f", *NUMBERS)))
    yield live
    live.reset()


@pytest.fixture(scope="module")
def classes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = classifier(checkpoint, tmp_path_factory.mktemp("classes"), "bad", "good")
    with live_server(folder, tmp_path_factory.mktemp("s")) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<2f", 0.0, 1.0)))
        yield live


def test_cohere_v1(vectors: LiveServer) -> None:
    body = {"model": "test/model", "texts": TEXTS, "input_type": "search_document", "truncate": "END"}
    answer = post(vectors, "/v1/embed", body).json()
    assert answer["response_type"] == "embeddings_floats"
    assert answer["embeddings"] == [NUMBERS] * 2
    assert answer["texts"] == TEXTS
    num_tokens = sum(map(len, prompts(vectors)))
    assert answer["meta"] == {"api_version": {"version": "1"}, "billed_units": {"input_tokens": num_tokens}}
    answer = post(vectors, "/v1/embed", body | {"embedding_types": ["float"]}).json()
    assert (answer["response_type"], answer["embeddings"]) == ("embeddings_by_type", {"float": [NUMBERS] * 2})


def test_cohere_v2(vectors: LiveServer) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    body = {"inputs": [{"content": [{"type": "text", "text": "wa"}, {"type": "text", "text": "ter"}]}]}
    answer = post(vectors, "/v2/embed", body | {"embedding_types": types}).json()
    assert "response_type" not in answer
    found = answer["embeddings"]
    assert found["float"] == [NUMBERS]
    assert [*struct.unpack("<9f", base64.b64decode(found["base64"][0]))] == NUMBERS
    assert found["ubinary"] == [[0b10100101, 0b10000000]]
    assert found["binary"] == [[0b10100101 - 128, 0]]
    assert prompts(vectors) == [vectors.tokenizer.encode("water", add_special_tokens=True)]
    assert post(vectors, "/v2/embed", {"texts": TEXTS}).json()["embeddings"] == {"float": [NUMBERS] * 2}


@pytest.mark.parametrize(("truncate", "kept"), [("END", slice(0, 3)), ("START", slice(-3, None))])
def test_cohere_cuts(vectors: LiveServer, truncate: str, kept: slice) -> None:
    post(vectors, "/v2/embed", {"texts": ["The gate opens."], "max_tokens": 3, "truncate": truncate})
    whole = vectors.tokenizer.encode("The gate opens.", add_special_tokens=True)
    assert prompts(vectors) == [whole[kept]]
    long = {"texts": ["wheel " * 1000]}
    assert post(vectors, "/v2/embed", long).status == 200
    assert "512 tokens" in error_of(post(vectors, "/v2/embed", long | {"truncate": "NONE"}), 400)["message"]


def test_embed(vectors: LiveServer) -> None:
    """`/embed` is text-embeddings-inference's, not Cohere's; `/` is the same for this model."""
    for path in ("/embed", "/"):
        assert post(vectors, path, {"inputs": "water"}).json() == [NUMBERS]
        assert post(vectors, path, {"inputs": TEXTS, "normalize": False, "truncate": True}).json() == [NUMBERS] * 2
    long = "The gate opens. " * 300
    assert post(vectors, "/embed", {"inputs": long, "truncation_direction": "Left"}).status == 200
    whole = vectors.tokenizer.encode(long, add_special_tokens=True)
    assert prompts(vectors)[-1] == whole[-512:]
    assert "512 tokens" in error_of(post(vectors, "/embed", {"inputs": long, "truncate": False}), 400)["message"]
    poolings = [request.sampling.pooling for request in vectors.do(lambda: vectors.scheduler.added)]
    assert [pooling is not None and pooling.is_normalized for pooling in poolings[:3]] == [True, False, False]


def test_similarity(live: LiveServer) -> None:
    def unit_of(request: AddRequest) -> bytes:
        share = len(prompt_ids(request)) / 100
        return struct.pack("<2f", share, (1 - share * share) ** 0.5)

    live.plays(lambda request, _: Script([0], pooled=unit_of(request)))
    body = {"inputs": {"source_sentence": "water", "sentences": [*TEXTS, "wheel wheel"]}}
    found = post(live, "/similarity", body).json()
    scored = post(live, "/score", {"text_1": "water", "text_2": [*TEXTS, "wheel wheel"]}).json()
    assert found == [each["score"] for each in scored["data"]]
    assert found[0] == pytest.approx(1.0)
    assert post(live, "/", body).json() == found
    live.reset()


def test_texts_in_order_of_their_scores(live: LiveServer) -> None:
    """`/rerank` with `texts` in place of `documents` answers with a list."""

    def logit_of(request: AddRequest) -> bytes:
        return struct.pack("<2f", 1.0, 0.01 * len(prompt_ids(request)))

    live.plays(lambda request, _: Script([0], pooled=logit_of(request)))
    body = {"query": "gate", "texts": TEXTS, "return_text": True}
    found = post(live, "/rerank", body).json()
    assert [each["index"] for each in found] == [1, 0]
    assert [each["text"] for each in found] == [TEXTS[1], TEXTS[0]]
    assert found[0]["score"] > found[1]["score"]
    plain = post(live, "/rerank", {"query": "gate", "texts": TEXTS}).json()
    assert [{*each} for each in plain] == [{"index", "score"}] * 2
    live.reset()


def test_predict(classes: LiveServer) -> None:
    one = [
        {"score": pytest.approx(0.731059, abs=1e-5), "label": "good"},
        {"score": pytest.approx(0.268941, abs=1e-5), "label": "bad"},
    ]
    for path in ("/predict", "/"):
        assert post(classes, path, {"inputs": "water"}).json() == one
        assert post(classes, path, {"inputs": [["water"], ["gate"]]}).json() == [one, one]
    raw = post(classes, "/predict", {"inputs": "water", "raw_scores": True}).json()
    assert raw == [{"score": 1.0, "label": "good"}, {"score": 0.0, "label": "bad"}]
    assert error_of(post(classes, "/predict", {"inputs": ["water", "gate"]}), 400)["param"] == "inputs"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embed", {}, "texts"),
        ("/v2/embed", {"texts": ["a"], "inputs": []}, "texts"),
        ("/v2/embed", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["half"]}, "embedding_types"),
        ("/v2/embed", {"images": ["data:"]}, "images"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs"),
        ("/v2/embed", {"texts": []}, "input"),
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ("/embed", {"inputs": "a", "encoding_format": "base64"}, "encoding_format"),
        ("/similarity", {}, "inputs"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "a", "texts": ["b"], "return_documents": True}, "return_documents"),
        ("/rerank", {"query": "a", "texts": ["b"], "truncation_direction": "Left"}, "truncation_side"),
    ],
)
def test_refused(vectors: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(post(vectors, path, body), 400)["param"] == param


def test_a_model_without_chats_starts_no_process_for_templates(checkpoint: Path, tmp_path: Path) -> None:
    """Until a long text needs one."""
    folder, sockets = tmp_path / "m", tmp_path / "s"
    folder.mkdir()
    sockets.mkdir()
    with live_server(classifier(checkpoint, folder, "fits"), sockets, max_model_len=1 << 17) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<f", 1.0)))
        assert post(live, "/classify", {"input": "water"}).status == 200
        assert not live.server.service.prompts._children.process_ids
        assert post(live, "/classify", {"input": "water " * 20_000}).status == 200
        assert live.server.service.prompts._children.process_ids


def test_classes_are_not_predicted_without_any(vectors: LiveServer) -> None:
    assert "has no classes" in error_of(post(vectors, "/predict", {"inputs": "a"}), 404)["message"]


def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens for which requests hold room in the queue."""
    found: list[int] = []
    resize = Place.resize

    def noted(place: Place, num_seqs: int, num_tokens: int, tenant: str) -> None:
        found.append(num_tokens)
        resize(place, num_seqs, num_tokens, tenant)

    monkeypatch.setattr(Place, "resize", noted)
    return found


QUERY = "How high is the water behind the gate? " * 3


@pytest.mark.parametrize("name", ["a-cross-encoder", "qwen3-reranker-seq-cls", "embedder"])
def test_room_is_held_for_what_each_prompt_repeats(
    checkpoint: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A body with a long query and many short documents becomes many more tokens than it has bytes."""
    folder = tmp_path / name
    folder.mkdir()
    classifier(checkpoint, folder, "fits")
    config = json.loads((folder / "config.json").read_text())
    architecture = "Qwen3ForSequenceClassification" if name.startswith("qwen3") else config["architectures"][0]
    if name == "embedder":
        architecture = "BertModel"
        said = {"prompts": {"document": "This text has been found: " * 3}, "default_prompt_name": "document"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": [architecture], "num_key_value_heads": 4, "intermediate_size": 64})
    )
    with live_server(folder, tmp_path_factory.mktemp("s")) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<f", 1.0)))
        found = held(monkeypatch)
        asked = {"/rerank": {"query": QUERY, "documents": ["b"] * 40}}
        if name == "embedder":
            asked |= {"/v1/embeddings": {"input": ["b"] * 40}, "/embed": {"inputs": ["b"] * 40}}
        for path, body in asked.items():
            before = len(prompts(live))
            assert post(live, path, body).status == 200
            assert found.pop() >= sum(map(len, prompts(live)[before:])) > len(json.dumps(body)), path


def test_a_long_document_loses_its_end_and_the_template_nothing(
    checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a template, too, at most so many tokens of a document are read; and the answer's tokens are all counted."""
    folder = tmp_path / "qwen3-reranker"
    folder.mkdir()
    classifier(checkpoint, folder, "fits")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_key_value_heads": 4, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with live_server(folder, tmp_path_factory.mktemp("s")) as live:
        live.plays(lambda request, _: Script([0], pooled=struct.pack("<f", 1.0)))
        template = TEMPLATES["qwen3-reranker"]
        before, behind = (
            live.tokenizer.encode(text, add_special_tokens=False) for text in (template.before, template.behind)
        )
        head = template.pair.format(instruction=template.instruction, query="gate", document="").rstrip()
        document = "the water behind the gate " * 400
        head_ids = live.tokenizer.encode(head, add_special_tokens=False)
        whole = live.tokenizer.encode(f"{head} {document}", add_special_tokens=False)
        assert whole[: len(head_ids)] == head_ids
        lengths = {0: 512, 10_000: 512, 7: len(before) + len(head_ids) + 7 + len(behind)}
        for most, length in lengths.items():
            body = {"query": "gate", "documents": [document, "b"], "max_tokens_per_doc": most}
            answer = post(live, "/v2/rerank", body).json()
            cut, short = prompts(live)[-2:]
            kept = length - len(before) - len(behind)
            assert cut == [*before, *whole[:kept], *behind]
            assert short[-len(behind) :] == behind
            assert answer["usage"]["prompt_tokens"] == len(cut) + len(short)
