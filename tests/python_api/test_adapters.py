"""Adapters of a Python program: `LoRARequest`, as vLLM spells it."""

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ApiError, ConfigError, LoRARequest, SamplingParams
from tests.e2e.adapters import make_adapter
from tests.e2e.checkpoints import greedy
from tests.python_api.conftest import SMALL, Checkpoint

PROMPT = [40, 41, 42, 43, 44, 45]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_each_prompt_may_name_an_adapter(checkpoint: Checkpoint, tmp_path: Path) -> None:
    models = [checkpoint.model] + [
        make_adapter(tmp_path / name, checkpoint.model, rank, seed=rank) for name, rank in (("sql", 8), ("law", 4))
    ]
    base, sql, law = ([int(token) for token in greedy(model, PROMPT, 16)] for model in models)
    assert len({tuple(base), tuple(sql), tuple(law)}) == 3
    asks_sql, asks_law = (LoRARequest(name, i + 1, str(tmp_path / name)) for i, name in enumerate(("sql", "law")))
    with LLM(checkpoint.folder, lora=[f"law={tmp_path / 'law'}"], enable_lora=True, **SMALL) as llm:

        def said(adapter: Any, num_prompts: int = 1) -> list[list[int]]:
            outputs = llm.generate([PROMPT] * num_prompts, GREEDY, use_tqdm=False, lora_request=adapter)
            return [output.outputs[0].token_ids for output in outputs]

        assert said([asks_sql, None, asks_law, asks_sql], 4) == [sql, base, law, sql]
        assert said(asks_sql) == [sql]
        assert said(None) == [base]
        chat = [{"role": "user", "content": "Hello"}]
        answers = [llm.chat(chat, GREEDY, use_tqdm=False, lora_request=each)[0] for each in (None, asks_sql)]
        assert answers[0].outputs[0].text != answers[1].outputs[0].text
        vectors = [llm.embed(PROMPT, use_tqdm=False, lora_request=each)[0] for each in (None, asks_sql)]
        assert vectors[0].outputs.embedding != vectors[1].outputs.embedding
        with pytest.raises(ValueError, match="4 prompts, but 2 adapters"):
            said([asks_sql, asks_law], 4)
        with pytest.raises(ApiError, match=r"is that of .*law'"):
            said(LoRARequest("law", 3, str(tmp_path / "sql")))
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/adapter_config.json").write_text((tmp_path / "law/adapter_config.json").read_text())
        (tmp_path / "bad/adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0damaged!")
        with pytest.raises(ApiError, match="adapter_model"):
            said(LoRARequest("bad", 4, str(tmp_path / "bad")))
        assert said(asks_law) == [law]


@pytest.mark.parametrize(("name", "number", "path"), [("", 1, "x"), ("x", 0, "x"), ("x", 1, "")])
def test_an_adapter_needs_a_name_a_number_and_a_path(name: str, number: int, path: str) -> None:
    with pytest.raises(ValueError, match=r"adapter needs|lora_int_id"):
        LoRARequest(name, number, path)


def test_an_adapter_of_an_option_that_is_not_there_is_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"lora sql=/nowhere"):
        LLM(checkpoint.folder, lora=["sql=/nowhere"], **SMALL)
