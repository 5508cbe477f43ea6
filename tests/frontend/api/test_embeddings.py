"""POST /v1/embeddings by a whole server of the demo model: vectors, formats, limits, and what is refused."""

import base64
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from penstock.config import ConfigError, FrontendOptions
from penstock.ipc.messages import AddRequest, Pooling, PoolingKind
from penstock.models.embeddings import Embeddings, embeddings_of
from penstock.models.files.folder import HuggingFaceFolder
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import error_of, post
from tests.frontend.live_server import LiveServer

SIZE = 64


def vector_of(request: AddRequest) -> bytes:
    """Numbers that show what came to the engine."""
    pooling = request.sampling.pooling
    assert pooling is not None
    ids = prompt_ids(request)
    return struct.pack("<4f", len(ids), ids[0], ids[-1], pooling.size)


@pytest.fixture
def embedding(live: LiveServer) -> Iterator[LiveServer]:
    live.plays(lambda request, _: Script([0], pooled=vector_of(request)))
    yield live
    live.reset()


def ask(live: LiveServer, **fields: Any) -> Any:
    return post(live, "/v1/embeddings", {"model": "test/model"} | fields)


def test_openai_client(embedding: LiveServer) -> None:
    """It asks for base64 unless it is told otherwise."""
    texts = ["one pipe", "two pipes and a gate"]
    ids = [embedding.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for kwargs in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="test/model", input=texts, **kwargs)  # type: ignore[arg-type]
            vectors: list[Any] = [each.embedding for each in answer.data]
            found = [
                array("f", base64.b64decode(vector)).tolist() if isinstance(vector, str) else vector
                for vector in vectors
            ]
            assert found == [[len(each), each[0], each[-1], 0] for each in ids]
            assert [each.index for each in answer.data] == [0, 1]
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        answer = client.embeddings.create(model="test/model", input=ids)
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        answer = client.embeddings.create(model="test/model", input=ids[0], dimensions=3)
        assert answer.data[0].embedding == [len(ids[0]), ids[0][0], ids[0][-1], 3]


def test_langchain(embedding: LiveServer) -> None:
    """Texts as they are; by default it would cut them with the tokenizer of OpenAI's models."""
    texts = ["one pipe", "two pipes and a gate"]
    client = OpenAIEmbeddings(
        model="test/model", base_url=f"{embedding.url}/v1", api_key=SecretStr("none"), check_embedding_ctx_length=False
    )
    found = client.embed_documents(texts)
    assert [vector[0] for vector in found] == [
        len(embedding.tokenizer.encode(text, add_special_tokens=True)) for text in texts
    ]
    assert client.embed_query(texts[1]) == found[1]


def test_what_the_engine_is_asked(embedding: LiveServer) -> None:
    ask(embedding, input=[[5, 6, 7, 8]], truncate_prompt_tokens=2, normalize=False)
    [request] = embedding.do(lambda: embedding.scheduler.added)
    assert prompt_ids(request) == [7, 8]
    assert request.sampling.max_tokens == 1
    assert request.sampling.pooling == Pooling("last", 0, is_normalized=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "messages": [{}]}, "messages"),
        ({"input": [1] * 513}, "input"),
        ({"input": "a", "model": "another"}, "model"),
    ],
)
def test_refused(embedding: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = error_of(ask(embedding, **fields), 404 if param == "model" else 400)
    assert error["param"] == param


def test_a_text_may_fill_the_context(embedding: LiveServer) -> None:
    assert ask(embedding, input=[1] * 512).status == 200


def test_numbers_that_are_none(embedding: LiveServer) -> None:
    embedding.plays(lambda request, _: Script([0], pooled=struct.pack("<2f", 1.0, float("nan"))))
    assert "not finite" in error_of(ask(embedding, input="a"), 500)["message"]


MODULES = '[{"type": "a.models.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}'


@pytest.mark.parametrize(
    ("end", "settings", "options", "expected"),
    [
        ("]", '{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}', {}, ("last", False)),
        (', {"type": "a.Normalize", "path": "2_N"}]', '{"pooling_mode_mean_tokens": true}', {}, ("mean", True)),
        ("]", '{"pooling_mode": "mean"}', {}, ("mean", False)),
        ("]", '{"pooling_mode_cls_token": true}', {}, ("cls", False)),
        ("]", '{"pooling_mode": "max"}', {}, ("max", False)),
        ("]", '{"pooling_mode_mean_sqrt_len_tokens": true}', {}, ("mean_sqrt_len", False)),
        ("]", '{"pooling_mode_mean_tokens": true, "include_prompt": false}', {}, "include_prompt"),
        ("]", '{"pooling_mode_cls_token": true}', {"pooling": "mean"}, ("mean", False)),
        ("]", '{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}', {}, "mean_tokens"),
        (', {"type": "a.Dense", "path": "2_D"}]', '{"pooling_mode_lasttoken": true}', {}, "Dense"),
        (', {"type": "a.CNN", "path": "2_C"}]', '{"pooling_mode_lasttoken": true}', {}, "CNN"),
        ("", "{}", {}, "not a list"),
    ],
)
def test_what_a_checkpoint_says(
    tmp_path: Path, end: str, settings: str, options: dict[str, Any], expected: tuple[PoolingKind, bool] | str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {SIZE}}}')
    (tmp_path / "modules.json").write_text(MODULES + end)
    (tmp_path / "1_Pooling" / "config.json").write_text(settings)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            embeddings_of(HuggingFaceFolder(tmp_path), FrontendOptions(**options))
    else:
        found = embeddings_of(HuggingFaceFolder(tmp_path), FrontendOptions(**options))
        assert found == Embeddings(*expected, SIZE)


def test_without_modules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert embeddings_of(HuggingFaceFolder(tmp_path), FrontendOptions()) == Embeddings("last", True, 0)
