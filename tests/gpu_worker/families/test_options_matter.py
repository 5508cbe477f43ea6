"""No option of a family's cases could be overlooked: without it the tokens, or at least their scores, are others."""

from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.families import registry
from penstock.models.finding.registry import open_checkpoint
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.ignored_options import without_each_option
from tests.gpu_worker.families.run import Scored, texts_of
from tests.gpu_worker.families.schedules import IS_LONG
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import is_ours

_USUAL = ("gemma3_text", "gpt_oss", "llama4_text", "minimax_m2", "qwen2_moe")
_TYPES = sorted({case.model_type for name, case in CASES.items() if is_ours(name)}) if IS_LONG else _USUAL


@pytest.mark.parametrize("model_type", _TYPES)
def test_without_an_option_the_answers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Each option of the type's cases matters in one of them."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    matters: dict[str, bool] = {}
    for name, case in CASES.items():
        if case.model_type != model_type:
            continue
        reference = Reference(tmp_path / name, case)
        config = registry.parse_model_config(open_checkpoint(tmp_path / name).config, "own")
        assert isinstance(config, Decoder)
        assert _differences(reference) == ""
        family = registry.family_of(config)
        for option, changed in without_each_option(config):
            if not matters.get(option):
                registry.register(family._replace(parse=lambda *_, it=changed: it, ignores=lambda *_: True))
                matters[option] = bool(_differences(reference))
        registry.register(family)
    assert [option for option, does in matters.items() if not does] == []


def _differences(reference: Reference) -> str:
    """How the model's answers differ from the reference's; its description may not fit its weights, or itself."""
    texts = texts_of(reference.case)
    try:
        engine = Scored(reference.folder, model_impl="own", cpu_kernels="torch", num_pages=200)
    except (ConfigError, ValueError) as error:
        return str(error)
    try:
        answers = engine.answers(texts)
    except ValueError as error:
        return str(error)
    return "; ".join(filter(None, map(reference.errors, texts, answers)))
