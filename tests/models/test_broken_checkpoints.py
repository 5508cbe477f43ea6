"""What is said of a checkpoint that cannot be served: one clear sentence, at once, with what to do."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.config import Config, ConfigError, ModelOptions
from penstock.models.check import check_checkpoint
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from tests.models.broken_checkpoints import (
    BROKEN,
    change,
    check_sentence,
    half_downloaded,
    in_shards,
    make_good,
    write_tokenizer,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that can be served."""
    monkeypatch.delenv("PENSTOCK_TEST_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return make_good(tmp_path / "checkpoint")


def check(folder: Path) -> None:
    check_checkpoint(open_model(located(Config(model=ModelOptions(model=str(folder))))))


@pytest.mark.parametrize(("spoil", "words"), BROKEN.values(), ids=BROKEN)
def test_the_command_says_one_sentence(
    folder: Path, spoil: Callable[[Path], object], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    check(folder)
    spoil(folder)
    assert main(["serve", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock: ")
    check_sentence(said.removeprefix("penstock: ").removesuffix("\n"))
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("impl", "architecture", "words"),
    [
        ("own", "OPTForCausalLM", ("word_embed_proj_dim", "without --model-impl own")),
        ("own", "PersimmonForCausalLM", ("not supported with --model-impl own", "the nearest that is: ")),
        ("transformers", "NoSuchForCausalLM", ("NoSuchForCausalLM is not supported", "the nearest that is: ")),
    ],
)
def test_the_code_that_was_asked_for_cannot(
    folder: Path, impl: str, architecture: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, architectures=[architecture], word_embed_proj_dim=8)
    assert main(["serve", str(folder), "--model-impl", impl]) == 2
    said = capsys.readouterr().err
    check_sentence(said.removesuffix("\n"))
    assert [word for word in words if word not in said] == [], said


def test_a_checkpoint_in_shards_can_be_served(folder: Path) -> None:
    in_shards(folder)
    check(folder)


@pytest.mark.parametrize("num_tokens", [32, 33])
def test_what_goes_beyond_the_vocabulary_is_not_refused_if_it_was_added(folder: Path, num_tokens: int) -> None:
    write_tokenizer(folder, num_tokens)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-1] + ', "added_tokens": [{"id": 32, "content": "[PAD]"}]}')
    check(folder)


def test_half_a_download_in_the_cache_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network it is one sentence, too."""
    cached = folder.parent / "models--org--name"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    folder.rename(cached / "snapshots" / "abc")
    half_downloaded(cached / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder.parent))
    with pytest.raises(ConfigError, match="the download is not complete") as caught:
        check(Path("org/name"))
    check_sentence(str(caught.value))


@pytest.fixture
def nobodys() -> Iterator[None]:
    """As a user that may not read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["", "config.json", "tokenizer.json", "model.safetensors"])
def test_what_may_not_be_read(name: str, nobodys: None) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = make_good(Path(place) / "checkpoint")
        (folder / name).chmod(0)
        try:
            with pytest.raises(ConfigError, match="Permission denied") as caught:
                check(folder)
        finally:
            (folder / name).chmod(0o700)
    assert str(folder / name) in str(caught.value)
    check_sentence(str(caught.value))


def test_all_are_refused_without_torch(folder: Path) -> None:
    program = (
        "import sys\nfrom contextlib import suppress\nfrom pathlib import Path\n"
        "from tests.models.broken_checkpoints import BROKEN, make_good\n"
        "from tests.models.test_broken_checkpoints import refused\n"
        "for number, (spoil, _) in enumerate(BROKEN.values()):\n"
        "    place = make_good(Path(sys.argv[1]) / str(number) / 'checkpoint')\n    spoil(place)\n"
        "    assert refused(place)\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", program, str(folder.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def refused(folder: Path) -> bool:
    with suppress(ConfigError):
        check(folder)
        return False
    return True


def test_a_refusal_comes_before_torch(folder: Path) -> None:
    """By the command itself, and from this process alone."""
    change(folder, architectures=["BloomForCausalLM"])
    program = (
        "import sys\nfrom penstock.cli.__main__ import main\n"
        f"code = main(['serve', {str(folder)!r}])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: architecture BloomForCausalLM is not supported")
    assert len(done.stderr.splitlines()) == 1
