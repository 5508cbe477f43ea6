"""Vectors of prompts: those of transformers, in the prompts' order; what fails takes no other along."""

import numpy as np
import pytest
import torch

from penstock import LLM, ApiError, AsyncLLM, BatchError, EmbeddingRequestOutput, RequestOutputKind, SamplingParams
from penstock.prompts import Prompt
from tests.python_api.conftest import SMALL, Checkpoint

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(5 + 9 * i)] for i in range(5)]


def expected(checkpoint: Checkpoint, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        state = checkpoint.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_vectors_are_those_of_transformers(llm: LLM, checkpoint: Checkpoint) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4"]
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_token_ids == prompt
        np.testing.assert_allclose(output.outputs.embedding, expected(checkpoint, prompt), atol=1e-5)
        assert output.bill is not None
    [text] = llm.embed("a b", use_tqdm=False)
    [same] = llm.embed(text.prompt_token_ids, use_tqdm=False)
    assert text.outputs == same.outputs
    [short] = llm.embed("a b", dimensions=4, normalize=False, truncate_prompt_tokens=2, use_tqdm=False)
    assert len(short.outputs.embedding) == 4
    assert short.prompt_token_ids == text.prompt_token_ids[-2:]


def test_one_that_fails_takes_no_other_along(llm: LLM) -> None:
    prompts: list[Prompt] = ["a", [3] * 10_000, "b"]
    with pytest.raises(BatchError) as caught:
        llm.embed(prompts, use_tqdm=False)
    outputs = [output for output in caught.value.outputs if isinstance(output, EmbeddingRequestOutput)]
    assert [bool(output.outputs.embedding) for output in outputs] == [True, False, True]
    assert [output.error is None for output in outputs] == [True, False, True]
    with pytest.raises(ApiError, match="dimensions"):
        llm.embed("a", dimensions=10_000, use_tqdm=False)
    with pytest.raises(ApiError, match="not of a chat"):
        llm.embed([[{"role": "user", "content": "a"}]], use_tqdm=False)


async def test_beside_generation(checkpoint: Checkpoint) -> None:
    async with AsyncLLM(checkpoint.folder, **SMALL) as llm:
        params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = llm.generate(PROMPTS[0], params)
        outputs = [await anext(stream)]
        vector = (await llm.embed(PROMPTS[1])).outputs.embedding
        np.testing.assert_allclose(vector, expected(checkpoint, PROMPTS[1]), atol=1e-5)
        outputs += [output async for output in stream]  # none, if all came at once
        assert outputs[-1].finished
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 200
