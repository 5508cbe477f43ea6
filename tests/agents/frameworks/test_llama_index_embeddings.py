"""llama-index's embeddings are those of the server, in whichever of its ways they are asked for."""

import json
import urllib.request

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.agents.scripted_server import demo_server

TEXTS = ["A penstock feeds a turbine.", "The scheduler admits requests while pages last.", "A prefix is shared."]


def ask(url: str, texts: list[str]) -> list[list[float]]:
    """The vectors by plain HTTP."""
    body = json.dumps({"model": "penstock-demo", "input": texts}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [entry["embedding"] for entry in json.load(answer)["data"]]


async def test_texts_queries_and_an_index() -> None:
    with demo_server() as url:
        client = OpenAILikeEmbedding(model_name="penstock-demo", api_base=f"{url}/v1", embed_batch_size=2)
        expected = [pytest.approx(vector, abs=1e-6) for vector in ask(url, TEXTS)]
        assert client.get_text_embedding_batch(TEXTS) == expected
        assert await client.aget_text_embedding_batch(TEXTS) == expected
        assert client.get_query_embedding(TEXTS[1]) == expected[1]
        index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=client)
        [found] = index.as_retriever(similarity_top_k=1).retrieve(TEXTS[2])
        assert found.node.get_content() == TEXTS[2]
        assert found.score == pytest.approx(1.0, abs=1e-5)
