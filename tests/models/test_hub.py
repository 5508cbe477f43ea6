"""Downloads from a hub: what comes, in which order, and what is said when it cannot."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import structlog

from penstock.config import Config, ConfigError, ModelOptions
from penstock.models.check import check_checkpoint
from penstock.models.finding.hub import _Progress
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model, served_model_names
from penstock.parts.adapters.options import AdapterOptions
from tests.e2e.checkpoints import make_checkpoint
from tests.e2e.servers import serving
from tests.frontend.adapters.adapters import write_adapter
from tests.models.fake_hub import COMMIT, FakeHub
from tests.models.gguf.written import add_model, write

NAME = "org/some-model"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, as `transformers` writes it, and what repositories have besides."""
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint(folder).save_pretrained(folder / "shards", max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    for path in (folder / "shards").iterdir():
        path.replace(folder / path.name)
    (folder / "shards").rmdir()
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "modeling.py",
        "tokenizer.py",
        "README.md",
        "consolidated.safetensors",
    ):
        (folder / name).write_bytes(b"not to be fetched")
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "source"))


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    with FakeHub() as hub:
        hub.repositories[NAME] = source
        yield hub


def weights(source: Path) -> set[str]:
    return {path.name for path in source.glob("model-*.safetensors")}


def find(cache: Path, endpoint: str, name: str = NAME, **environment: str) -> Config:
    config = Config(model=ModelOptions(model=name))
    found = located(config, {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint} | environment)
    check_checkpoint(open_model(found))
    return found


def refusal(cache: Path, endpoint: str, name: str = NAME, **environment: str) -> str:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        find(cache, endpoint, name, **environment)
    assert time.monotonic() - began < 90
    said = str(caught.value)
    assert "\n" not in said
    assert not said.endswith(".")
    return said


def test_what_is_needed_comes_and_is_found_from_then_on(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    found = find(tmp_path / "cache", hub.url)
    folder = Path(found.model.model)
    assert served_model_names(found) == (NAME,)
    assert {path.name for path in folder.iterdir()} == SMALL | weights(source) | {"model.safetensors.index.json"}
    assert len(weights(source)) > 1
    for path in folder.iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes()
    assert hub.fetched()[0] == "config.json"
    hub.asked.clear()
    assert find(tmp_path / "cache", hub.url) == found
    assert find(tmp_path / "cache", hub.url, f"{NAME}@{COMMIT}") == found
    assert hub.asked == []


def test_a_revision_may_be_named(hub: FakeHub, tmp_path: Path) -> None:
    found = find(tmp_path, hub.url, f"{NAME}@v1")
    assert served_model_names(found) == (NAME,)
    assert (tmp_path / "models--org--some-model/refs/v1").read_text() == COMMIT
    assert not (tmp_path / "models--org--some-model/refs/main").exists()
    said = refusal(tmp_path, hub.url, f"{NAME}@v2")
    assert "no such branch, tag or commit" in said
    assert f"`hf download {NAME} --revision v2`" in said


def test_a_transfer_that_breaks_off_goes_on_where_it_was(
    hub: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what has come is kept by chunks
    cut = min(weights(source))
    hub.cuts[cut] = 1
    find(tmp_path, hub.url)
    begins = [asked.begin for asked in hub.asked if asked.method == "GET" and asked.path.endswith(cut)]
    assert len(begins) == 2
    assert begins[0] == 0
    assert begins[1] > 0


def test_a_download_that_has_ended_early_goes_on_with_the_files_that_lack(
    hub: FakeHub, source: Path, tmp_path: Path
) -> None:
    last = max(weights(source))
    hub.refused.add(last)
    said = refusal(tmp_path, hub.url)
    assert "403" in said
    hub.refused.clear()
    kept = {path.name for path in (tmp_path / f"models--org--some-model/snapshots/{COMMIT}").iterdir()}
    assert last not in kept
    assert "config.json" in kept
    offline = refusal(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert "is the download complete?" in offline
    hub.asked.clear()
    find(tmp_path, hub.url)
    assert last in hub.fetched()
    assert not set(hub.fetched()) & kept


def test_a_file_that_has_vanished_from_the_cache_is_fetched_again(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    folder = Path(find(tmp_path, hub.url).model.model)
    for name in ("config.json", max(weights(source))):
        (folder / name).resolve().unlink()
        assert "the download is not complete" in refusal(tmp_path, hub.url, HF_HUB_OFFLINE="1")
        hub.asked.clear()
        find(tmp_path, hub.url)
        assert hub.fetched() == [name]


@pytest.mark.parametrize("token", ["", "bad"])
def test_no_such_repository(hub: FakeHub, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    said = refusal(tmp_path, hub.url, "org/other")
    assert "no repository" in said
    assert "hf download org/other" in said


@pytest.mark.parametrize("token", ["", "bad"])
def test_a_gated_repository(hub: FakeHub, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", token)
    said = refusal(tmp_path, hub.url)
    assert "gated" in said
    assert "HF_TOKEN" in said
    assert "hf download" in said
    monkeypatch.setenv("HF_TOKEN", "good")
    find(tmp_path, hub.url)


def test_no_network(tmp_path: Path, hub: FakeHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    said = refusal(tmp_path, closed)
    assert closed in said
    assert f"hf download {NAME}" in said


def test_a_hub_that_does_not_answer(tmp_path: Path, hub: FakeHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = refusal(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "the download from" in said


def test_offline_nobody_is_asked(hub: FakeHub, tmp_path: Path) -> None:
    said = refusal(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert f"`hf download {NAME}`" in said
    assert "HF_HUB_OFFLINE" in said
    assert hub.asked == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture BloomForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "spqr"}}, "spqr, says quantization_config in config.json"),
        ({"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Model"}}, "remote code is never run"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights(
    hub: FakeHub, source: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert words in refusal(tmp_path, hub.url)
    assert hub.fetched() == ["config.json"]


@pytest.mark.parametrize(
    ("file", "becomes", "words"),
    [
        ("tokenizer.json", "tokenizer.model", "tokenizer.model and no tokenizer.json"),
        ("config.json", "adapter_config.json", "LoRA adapter"),
        ("config.json", "other.json", "no config.json"),
        ("model.safetensors.index.json", "other.json", ""),
    ],
)
def test_the_list_of_files_tells(
    hub: FakeHub, source: Path, tmp_path: Path, file: str, becomes: str, words: str
) -> None:
    (source / file).rename(source / becomes)
    if not words:
        for name in [*weights(source), "consolidated.safetensors"]:
            (source / name).unlink()
        words = "pickled weights"
    assert words in refusal(tmp_path, hub.url)
    assert not weights(source) & set(hub.fetched())


def test_a_disk_without_room(hub: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.claimed_size[max(weights(source))] = 1 << 60
    said = refusal(tmp_path, hub.url)
    assert "not enough disk space" in said
    assert " free)" in said
    assert not weights(source) & set(hub.fetched())
    del hub.claimed_size[max(weights(source))]
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("penstock.models.finding.hub.shutil.disk_usage", lambda path: usage(1 << 20))
    assert "not enough disk space" in refusal(tmp_path, hub.url)


def test_a_cache_that_is_not_ours(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "hf download" in refusal(tmp_path / "file", hub.url)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_told(
    hub: FakeHub, tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.models.finding.hub._LOG_SECONDS", 0.0)
    monkeypatch.setattr("penstock.models.finding.hub._WORTH_TELLING", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with structlog.testing.capture_logs() as logged:
        find(tmp_path, hub.url)
    if is_terminal:
        assert logged == []
        assert f"downloading {NAME}" in capfd.readouterr().err
    else:
        assert {(line["event"], line["model"]) for line in logged} == {("downloading", NAME)}
        assert logged[-1]["received"] == logged[-1]["of"]


def test_progress_of_the_other_protocol(tmp_path: Path) -> None:
    """Large files come over Xet, which has a way of its own to tell."""
    reporting = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting")
    progress = _Progress(NAME, 100)
    report = SimpleNamespace(
        total_bytes=100, total_bytes_completed=40, total_bytes_completion_rate=1.0,
        total_transfer_bytes_completed=30, total_transfer_bytes_completion_rate=None,
    )  # fmt: skip
    with reporting.XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=0, name="x", tqdm_class=progress.bar()
    ) as reporter:
        reporter.update_progress(report)
    assert progress._num_come == 40


def test_a_frontend_needs_no_weights(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url}
    config = Config(model=ModelOptions(model=NAME))
    located(config, environment, with_weights=False)
    assert not weights(source) & set(hub.fetched())
    find(tmp_path, hub.url)
    assert weights(source) <= set(hub.fetched())


async def test_a_name_is_downloaded_and_served(hub: FakeHub, tmp_path: Path) -> None:
    body = {"prompt": "The gate", "max_tokens": 8, "model": NAME}
    async with (
        serving(NAME, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=hub.url) as server,
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=body) as answer,
    ):
        assert (await answer.json())["model"] == NAME


def test_a_command_downloads_alone(hub: FakeHub, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url}
        command = [sys.executable, "-m", "penstock.cli", "pull", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    done = run(NAME)
    assert (done.returncode, "own code" in done.stdout) == (0, True), done.stderr
    hub.asked.clear()
    assert run(NAME).returncode == 0
    assert hub.asked == []
    for arguments, words in (
        ((), "ORG/NAME"),
        (("llama3:8b",), "names of two parts"),
        (("org/other",), "there is no folder 'org/other' here"),
    ):
        refused = run(*arguments)
        assert refused.returncode == 2
        assert refused.stderr.startswith("penstock pull: ")
        assert words in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_the_command_refuses_with_one_sentence(hub: FakeHub, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-m", "penstock.cli", "serve", "org/other"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: there is no folder 'org/other' here")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def gguf_hub(hub: FakeHub, tmp_path: Path) -> FakeHub:
    """A repository of one model in several GGUF files, one of them in parts, and what there is besides."""
    source = tmp_path / "gguf"
    source.mkdir()
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-IQ4_XS.gguf"):
        write(source / name, add_model)
    write(source / "model-BF16.gguf", add_model, split_max_tensors=12)
    for name in ("README.md", "mmproj-model-F16.gguf", "config.json"):
        (source / name).write_bytes(b"{}")
    hub.repositories["org/model-GGUF"] = source
    return hub


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/model-GGUF", ["model-Q4_K_M.gguf"]),
        ("org/model-GGUF:Q8_0", ["model-Q8_0.gguf"]),
        ("org/model-GGUF:iq4_xs@v1", ["model-IQ4_XS.gguf"]),
        ("org/model-GGUF:BF16", ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"]),
    ],
)
def test_one_of_several_gguf_files(gguf_hub: FakeHub, name: str, files: list[str], tmp_path: Path) -> None:
    found = find(tmp_path / "cache", gguf_hub.url, name)
    assert Path(found.model.model).name == files[0]
    assert served_model_names(found) == (name.partition("@")[0],)
    assert sorted(gguf_hub.fetched()) == files
    gguf_hub.asked.clear()
    assert find(tmp_path / "cache", gguf_hub.url, name) == found
    assert gguf_hub.asked == []
    other = find(tmp_path / "cache", gguf_hub.url, "org/model-GGUF:Q8_0")  # beside it
    assert Path(other.model.model).name == "model-Q8_0.gguf"
    assert find(tmp_path / "cache", gguf_hub.url, name) == found


def test_a_choice_that_is_not_there(gguf_hub: FakeHub, tmp_path: Path) -> None:
    said = refusal(tmp_path, gguf_hub.url, "org/model-GGUF:Q5_K_M")
    assert "no GGUF file, or several, of 'Q5_K_M'" in said
    assert "model-IQ4_XS.gguf, model-Q4_K_M.gguf, model-Q8_0.gguf" in said
    assert "has no GGUF files" in refusal(tmp_path, gguf_hub.url, f"{NAME}:Q8_0")
    said = refusal(tmp_path, gguf_hub.url, "org/model-GGUF:Q8_0", HF_HUB_OFFLINE="1")
    assert "`hf download org/model-GGUF --include '*Q8_0*'` fetches it" in said


def test_adapters_come_before_anything_starts(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", "weights", chat_template_jinja="{{ messages }}")
    for name in ("adapter_model.bin", "optimizer.pt", "README.md"):
        (adapter / name).write_bytes(b"not to be fetched")
    hub.repositories["org/adapter"] = adapter
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
    config = Config(model=ModelOptions(model=str(source)))
    config = config.with_options(AdapterOptions(lora=("sql=org/adapter", f"here={adapter}")))
    for _ in range(2):
        found = located(config, environment).of(AdapterOptions).adapters
        assert found["here"] == str(adapter)
        files = {path.name for path in Path(found["sql"]).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
        assert set(hub.fetched()) == files
    (Path(found["sql"]) / "adapter_model.safetensors").unlink()  # as after a download that was broken off
    assert located(config, environment).of(AdapterOptions).adapters == found
    assert (Path(found["sql"]) / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("org/absent", "org/absent"),
        (NAME, "is no adapter"),
        ("/nowhere", "/nowhere"),
        ("no-such-folder", "no-such-folder"),
    ],
)
def test_an_adapter_that_is_not_there_is_named(hub: FakeHub, tmp_path: Path, given: str, says: str) -> None:
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
    config = Config().with_options(AdapterOptions(lora=(f"sql={given}",)))
    with pytest.raises(ConfigError, match=f"^--lora sql={given}: .*{says}"):
        located(config, environment)
    with pytest.raises(ConfigError, match=f"^--lora sql={given}: .*{says}"):
        located(config, environment | {"HF_HUB_OFFLINE": "1"})
