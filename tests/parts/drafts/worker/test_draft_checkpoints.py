"""Which checkpoints can guess for which, and what is said of the others before any process starts."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import Config, ConfigError
from penstock.config.groups.model import ModelOptions
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import validate
from penstock.models.finding.located import located
from penstock.models.part import check_further
from penstock.parts.drafts.checkpoints.check import check_drafter
from penstock.parts.drafts.options import DraftOptions
from penstock.parts.drafts.speculative import speculative_config
from tests.e2e.checkpoints import make_checkpoint
from tests.gpu_worker.checkpoints import edit_config

refused = partial(pytest.raises, ConfigError)


def config_of(model: Path, draft: Path | str, **keys: Any) -> Config:
    text = json.dumps({"method": "draft_model", "model": str(draft)} | keys)
    return Config(model=ModelOptions(model=str(model))).with_options(DraftOptions(speculative_config=text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    return tmp_path / "draft"


def edit_tokenizer(folder: Path, old: str, new: str) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab[new] = vocab.pop(old)
    path.write_text(json.dumps(content))


def test_the_same_tokens(folder: Path, draft: Path, tmp_path: Path) -> None:
    check_drafter(config_of(folder, draft))
    check_drafter(config_of(folder, folder))
    make_checkpoint(tmp_path / "padded", num_hidden_layers=1, vocab_size=300)
    check_drafter(config_of(folder, tmp_path / "padded"))
    edit_tokenizer(draft, "a", "something-else")
    with refused(match=r"token \d+ is 'something-else', but 'a' in .*must have the same tokens"):
        check_further(config_of(folder, draft))
    check_further(config_of(folder, draft), with_tokenizer=False)


def test_a_token_that_one_of_them_lacks(folder: Path, draft: Path) -> None:
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] != 2]
    del content["model"]["vocab"]["</s>"]
    path.write_text(json.dumps(content))
    with refused(match="token 2 is missing, but '</s>' in"):
        check_drafter(config_of(folder, draft))


def test_what_cannot_be_served_cannot_guess(folder: Path, draft: Path) -> None:
    with refused(match="the draft model .*: max_model_len 4096 exceeds its 2048 positions"):
        check_drafter(config_of(folder, draft, max_model_len=4096))
    with refused(match="--quantization nonsense: "):
        check_drafter(config_of(folder, draft, quantization="nonsense"))
    (draft / "model.safetensors").unlink()
    with refused(match="the draft model "):
        check_drafter(config_of(folder, draft))
    check_drafter(config_of(folder, draft), with_weights=False)
    edit_config(draft, architectures=["NobodyKnowsItForCausalLM"])
    with refused(match="NobodyKnowsIt"):
        check_drafter(config_of(folder, draft), with_weights=False)


def test_a_name_becomes_a_path(folder: Path, draft: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--some--draft" / "snapshots" / "0123456789"
    snapshot.parent.mkdir(parents=True)
    draft.rename(snapshot)
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    found = located(config_of(folder, "some/draft", num_speculative_tokens=7), environment)
    speculative = found.of(DraftOptions).speculative
    assert speculative is not None
    assert speculative.model == str(snapshot)
    assert speculative.num_speculative_tokens == 7
    assert located(found, environment) == found
    check_drafter(found)
    with refused(match="--speculative-config: no checkpoint folder at 'some/other'"):
        located(config_of(folder, "some/other"), environment)


def test_keys() -> None:
    implied = speculative_config('{"model": "x", "draft_tensor_parallel_size": 1, "quantization": null}')
    assert implied is not None
    assert implied.method == "draft_model"
    for text, said in (
        ('{"num_speculative_tokens": 3}', "method is required"),
        ('{"method": "draft_model"}', "needs `model`"),
        ('{"model": "x", "draft_tensor_parallel_size": 2}', "only 1 is supported"),
        ('{"method": "ngram", "max_model_len": 5}', "max_model_len has no effect with method ngram"),
        ('{"method": "ngram", "model": "x"}', "model has no effect with method ngram"),
    ):
        with pytest.raises(ValueError, match=said):
            speculative_config(text)


def test_stages_guess_with_ngram_only(folder: Path) -> None:
    parallel = ParallelOptions(pipeline_parallel_size=2)
    config = config_of(folder, folder)
    with refused(match="ngram only, not with draft_model"):
        validate(replace(config, parallel=parallel))
