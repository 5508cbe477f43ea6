"""Logits processors of somebody else: who may ask for them, what they do, and what becomes of their errors."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config.options import ConfigError
from penstock.config.samplers import Draw
from penstock.frontend.errors import EngineFailed, InvalidParameter
from penstock.parts.samplers.options import SamplerOptions
from penstock.parts.samplers.worker.processors import Processor, ProcessorError, load
from tests.parts.samplers.toy_processors import Only, returning, writing
from tests.python_api.conftest import SMALL, Checkpoint, checkpoint

__all__ = ["checkpoint"]

HERE = "tests.parts.samplers.toy_processors"
FLAGS = [f"{HERE}:Only", f"fails={HERE}:failing", f"shortens={HERE}:shortening", f"returns={HERE}:returning"]


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SamplerOptions(logits_processors=("a.b:C", "mine=a.b:make.it"))
    assert found.places == {"C": "a.b:C", "mine": "a.b:make.it"}
    point = EntryPoint("theirs", "x:y", "penstock.logits_processors")
    monkeypatch.setattr("penstock.parts.samplers.options.entry_points", lambda group: EntryPoints([point]))
    assert found.processor_names == ("theirs", "C", "mine")
    for bad in ("a.b", "=a:b", "a=b", ":c", "a:"):
        assert "must be NAME=MODULE:OBJECT" in SamplerOptions(logits_processors=(bad,)).problem(None)  # type: ignore[arg-type]


def test_what_cannot_be_loaded_is_told() -> None:
    assert load({"only": f"{HERE}:Only"}) == {"only": Only}
    for place, why in (("no_such:x", "cannot be imported"), (f"{HERE}:Other", "Other"), (f"{HERE}:__doc__", "called")):
        with pytest.raises(ConfigError, match=why):
            load({"x": place})


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("Only", '{"tokens": []}', "'Only': ValueError: tokens must not be empty"),
        ("Only", '{"other": 1}', "'Only': TypeError: "),
        ("fails", "{}", "'fails': RuntimeError: there are too many tokens"),
        (
            "shortens",
            "{}",
            r"'shortens': it returned a tensor of shape \[8\] and torch.float32 and not a tensor of shape \[9\]",
        ),
        ("returns", '{"kind": "nothing"}', "'returns': it returned NoneType and not a tensor"),
        ("returns", '{"kind": "meta"}', "'returns': NotImplementedError: "),
        ("returns", '{"kind": "complex"}', "'returns': it returned a tensor of shape .* and torch.complex64"),
        ("returns", '{"kind": "nested"}', "'returns': "),
        ("returns", '{"kind": "resized"}', r"'returns': it returned a tensor of shape \[3\]"),
        ("missing", "{}", "'missing': the worker does not have it"),
    ],
)
def test_errors_name_the_processor(name: str, arguments: str, why: str) -> None:
    options = SamplerOptions(logits_processors=tuple(FLAGS))
    processor = Processor(name, load(options.places).get(name), arguments)
    draw = Draw(torch.ones(3, dtype=torch.int32), 1, lambda: 0.5)
    for _ in range(2):
        with pytest.raises(ProcessorError, match=why):
            processor.apply(torch.zeros(9), draw)


def test_a_row_keeps_its_tokens_whatever_a_processor_writes() -> None:
    draw = Draw(torch.ones(3, dtype=torch.int32), 1, lambda: 0.5)
    Processor("writes", writing, "{}").apply(torch.zeros(9), draw)
    assert draw.token_ids.tolist() == [1, 1, 1]


def test_sparse_logits_are_logits() -> None:
    given = torch.arange(9.0)
    found = Processor("returns", returning, '{"kind": "sparse"}').apply(given, Draw(torch.ones(3), 1, lambda: 0.5))
    assert torch.equal(found, given)
    assert found.layout == torch.strided


def asked_with(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "temperature": 0.0} | fields)


def test_they_are_asked_for_by_name(checkpoint: Checkpoint) -> None:
    """And then the usual samplers follow; an error ends its request alone."""
    only: dict[str, Any] = {"name": "Only", "args": {"tokens": [60, 61, 62]}}
    with LLM(checkpoint.folder, logits_processors=FLAGS, **SMALL) as llm:
        prompts = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]]
        params = [
            asked_with(logits_processors=[only]),
            asked_with(temperature=1.0, top_k=5, typical_p=0.9, logits_processors=[only]),
            asked_with(),
        ]
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
        assert [list(tokens) for tokens in found[:2]] == [[60, 61, 62] * 2, [61, 62, 60] * 2]
        plain = found[2]
        asked: list[Any] = [{"qualname": "fails", "kwargs": {"after": 6}}]
        with pytest.raises(EngineFailed, match="logits processor 'fails': RuntimeError: there are too many tokens"):
            llm.generate([[1, 2, 3]], asked_with(logits_processors=asked), use_tqdm=False)
        [again] = llm.generate([[1, 2, 3]], params[2], use_tqdm=False)
        assert again.outputs[0].token_ids == plain
        for asked, why in (
            (["other"], r"logits_processors\[0\]: there is no logits processor 'other'; those here: Only, fails"),
            ([{"name": "Only", "args": [1]}], r"logits_processors\[0\].args must be an object"),
            (["Only"] * 9, "at most 8"),
            ([{"name": "Only", "args": {"tokens": [1] * 9000}}], "at most 16384 bytes"),
        ):
            with pytest.raises(InvalidParameter, match=why):
                llm.generate([[1]], asked_with(logits_processors=asked), use_tqdm=False)
