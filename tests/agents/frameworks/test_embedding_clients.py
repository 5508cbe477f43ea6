"""Clients that want vectors, and documents in the order of a query, get the server's own without being changed."""

import json
import math
import urllib.request
from collections.abc import Iterator
from typing import Any

import cohere
import pytest
import tiktoken
from huggingface_hub import InferenceClient
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_community.document_compressors import jina_rerank
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaIndexCohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from openai import BadRequestError, OpenAI

from tests.agents.scripted_server import demo_server

MODEL = "penstock-demo"
QUERY = "Which wheel turns?"
TEXTS = ["A penstock feeds a turbine.", "Pages last until they are evicted.", "The wheel turns in the water."]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server() as url:
        yield url


def ask(url: str, path: str, **body: Any) -> Any:
    """What the server answers to plain HTTP."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def vectors(url: str) -> list[Any]:
    """The server's vectors of the texts."""
    return [pytest.approx(each["embedding"], abs=1e-6) for each in ask(url, "/v1/embeddings", input=TEXTS)["data"]]


@pytest.fixture(scope="module")
def ranking(url: str) -> list[tuple[int, Any]]:
    """Its order of the texts."""
    found = ask(url, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    return [(each["index"], pytest.approx(each["relevance_score"], abs=1e-6)) for each in found]


def test_openai(url: str, vectors: list[Any]) -> None:
    """Numbers and base64, which is the client's own choice; fewer dimensions; token ids."""
    create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).embeddings.create
    assert [each.embedding for each in create(model=MODEL, input=TEXTS).data] == vectors
    assert [each.embedding for each in create(model=MODEL, input=TEXTS, encoding_format="float").data] == vectors
    short = create(model=MODEL, input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(short) == 8
    assert math.hypot(*short) == pytest.approx(1.0, abs=1e-6)
    ids = [ask(url, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    answer = create(model=MODEL, input=ids)
    assert [each.embedding for each in answer.data] == vectors
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_langchain(url: str, vectors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends token ids of OpenAI's models unless told otherwise: those that this model lacks are refused."""
    options: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    client = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    assert client.embed_documents(TEXTS) == vectors
    assert client.embed_query(TEXTS[1]) == vectors[1]
    encoding = tiktoken.Encoding(
        "large", pat_str=r"\w+|\W", mergeable_ranks={bytes([i]): 90_000 + i for i in range(256)}, special_tokens={}
    )  # OpenAI's own would be downloaded
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: encoding)
    with pytest.raises(BadRequestError, match="token id between 0 and"):
        OpenAIEmbeddings(**options).embed_documents(TEXTS)


@pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
def test_cohere(url: str, vectors: list[Any], ranking: list[tuple[int, Any]], kind: Any) -> None:
    client = kind(api_key="none", base_url=url)
    ranked = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    assert [(each.index, each.relevance_score) for each in ranked.results] == ranking[:2]
    types = ["float", "ubinary"]
    found = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=types)
    assert found.embeddings.float_ == vectors
    assert [len(each) * 8 for each in found.embeddings.ubinary] == [len(each) for each in found.embeddings.float_]
    if kind is cohere.Client:
        found = client.embed(model=MODEL, texts=TEXTS, input_type="search_document")
        assert found.embeddings == vectors
        assert found.meta.billed_units.input_tokens > 0


def test_cohere_in_langchain(url: str, vectors: list[Any], ranking: list[tuple[int, Any]]) -> None:
    options: dict[str, Any] = {"model": MODEL, "base_url": url, "cohere_api_key": "none"}
    assert CohereEmbeddings(**options).embed_documents(TEXTS) == vectors
    found = CohereRerank(**options, top_n=2).rerank(TEXTS, QUERY)
    assert [(each["index"], each["relevance_score"]) for each in found] == ranking[:2]


def test_jina_in_langchain(url: str, ranking: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jina_rerank, "JINA_API_URL", f"{url}/v1/rerank")
    found = jina_rerank.JinaRerank(jina_api_key="none", model=MODEL, top_n=2).rerank(TEXTS, QUERY)
    assert [(each["index"], each["relevance_score"]) for each in found] == ranking[:2]


def test_rerankers_of_llama_index(url: str, ranking: list[tuple[int, Any]]) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    options: dict[str, Any] = {"model": MODEL, "api_key": "none", "top_n": 2}
    for client in (
        LlamaIndexCohereRerank(base_url=url, **options),
        JinaRerank(base_url=f"{url}/v1", **options),
    ):
        found = client.postprocess_nodes(nodes, query_str=QUERY)
        assert [(TEXTS.index(each.node.get_content()), each.score) for each in found] == ranking[:2]


def test_hugging_face(url: str, vectors: list[Any]) -> None:
    """Its client posts to the server's own address, as text-embeddings-inference takes it, or to a route's."""
    scores = [each["score"] for each in ask(url, "/v1/score", text_1=QUERY, text_2=TEXTS)["data"]]
    for embedding, similarity in ((url, url), (f"{url}/embed", f"{url}/similarity")):
        assert InferenceClient(embedding).feature_extraction(TEXTS, normalize=True).tolist() == vectors
        found = InferenceClient(similarity).sentence_similarity(QUERY, other_sentences=TEXTS)
        assert found == pytest.approx(scores, abs=1e-6)
