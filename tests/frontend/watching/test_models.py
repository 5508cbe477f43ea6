"""`penstock models`: what is said of the checkpoints on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.cli.models import Chat, PageGroup, look, main
from tests.e2e.checkpoints import make_checkpoint
from tests.frontend.families import FAMILIES
from tests.gpu_worker.formats.writers import fp8
from tests.models.gguf.written import add_model, write

COMMITS = [f"{digit}" * 40 for digit in range(8)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one checkpoint for each thing that can be said."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "none"))
    add(tmp_path, made, "good")
    cached = tmp_path / "models--org--good"
    shutil.copytree(made, cached / "snapshots" / COMMITS[1])  # an older one, which no branch means
    change(add(tmp_path, made, "by-transformers"), architectures=["HeliumForCausalLM"])
    change(add(tmp_path, made, "unknown"), architectures=["ElectraModel"])
    change(add(tmp_path, made, "quantized"), quantization_config={"quant_method": "spqr"})
    (add(tmp_path, made, "half") / "model.safetensors").unlink()
    (add(tmp_path, made, "broken") / "model.safetensors").write_bytes(b"\xff" * 64)
    (add(tmp_path, made, "no-json") / "config.json").write_text("{")
    (tmp_path / "models--org--begun").mkdir()
    (tmp_path / "datasets--org--other/snapshots").mkdir(parents=True)
    return tmp_path


def add(cache: Path, made: Path, name: str) -> Path:
    cached = cache / f"models--org--{name}"
    snapshot = Path(shutil.copytree(made, cached / "snapshots" / COMMITS[0]))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(COMMITS[0])
    return snapshot


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def listed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_are_listed_whatever_their_state(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {(model["name"], model["revision"]): model for model in listed(capsys=capsys)}
    assert next(iter(models)) == ("penstock-demo", None)
    by_name = {name.removeprefix("org/"): model for (name, _), model in models.items()}
    assert ("org/good", "main") in models
    assert ("org/good", COMMITS[1]) in models
    assert {name: model["served_by"] for name, model in by_name.items()} == {
        "penstock-demo": "own code", "good": "own code", "by-transformers": "transformers", "unknown": None,
        "quantized": None, "half": None, "broken": None, "no-json": None, "begun": None,
    }  # fmt: skip
    words = {
        "unknown": "ElectraModel is not supported",
        "quantized": "quantized in a way that is not supported: spqr",
        "half": "incomplete: ",
        "broken": "not a readable safetensors file",
        "no-json": "not a JSON object",
        "begun": "incomplete: ",
    }
    assert [name for name, said in words.items() if said not in by_name[name]["reason"]] == []


def test_the_figures(made: Path) -> None:
    model = look(made, "m")
    config = json.loads((made / "config.json").read_text())
    num_bytes = 4 * (model.parameters or 0)
    header = (made / "model.safetensors").stat().st_size - num_bytes
    assert 8 < header < 10_000
    assert model.dtype == "float32"
    assert model.architecture == "LlamaForCausalLM"
    per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * (64 // 4) * 2 * 4
    assert model.kv_bytes_per_token == per_token
    assert model.memory_bytes == num_bytes + 1024 * per_token
    assert model.bytes_on_disk == sum(path.stat().st_size for path in made.iterdir())


def test_layers_that_keep_only_a_window_are_a_group_of_their_own(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "m"))
    change(folder, architectures=["MistralForCausalLM"], sliding_window=64)
    model = look(folder, "m")
    per_token = 2 * 2 * (64 // 4) * 2 * 4
    assert model.page_groups == (PageGroup(2, 64, per_token),)
    assert model.memory_bytes == (model.weight_bytes or 0) + 64 * per_token
    kinds = ["full_attention", "sliding_attention"]
    change(folder, architectures=["Qwen2ForCausalLM"], use_sliding_window=True, layer_types=kinds)
    halves = look(folder, "m").page_groups
    assert halves == (PageGroup(1, None, per_token // 2), PageGroup(1, 64, per_token // 2))


def test_how_it_chats(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "m"))
    assert look(folder, "m").chat == Chat(tools=None, reasoning=None)
    (folder / "chat_template.jinja").write_text(FAMILIES["command"].source("command"))
    assert look(folder, "m").chat == Chat(tools="command_r", reasoning="command_r")
    assert main([str(folder)]) == 0
    assert re.search("chat +calls: command_r, reasoning: command_r", capsys.readouterr().out)
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "the chat template does not compile" in (look(folder, "m").reason or "")


def test_text_for_people(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0].split() == [
        "name",
        "architecture",
        "params",
        "type",
        "on",
        "disk",
        "memory",
        "served",
        "by",
        "chat",
    ]
    assert len(plain) == 11
    assert any(line.startswith(f"org/good@{COMMITS[1][:12]} ") for line in plain)
    assert any(line.startswith("org/quantized ") and "no: quantized" in line for line in plain)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    table = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "penstock" in table
    assert "quantized" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("name", ["org/good", f"org/good@{COMMITS[1][:12]}", "folder"])
def test_one(cache: Path, made: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(made) if name == "folder" else name]) == 0
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert said["architecture"] == "Llama"
    assert said["type"] == "float32"
    assert "longest" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [("org/other", "`penstock pull org/other` downloads it"), ("other", "no folder, file or download 'other'")],
)
def test_one_that_is_not_there(cache: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert words in capsys.readouterr().err


def test_the_command_needs_no_torch(cache: Path) -> None:
    program = (
        "import sys\nfrom penstock.cli.models import main\ncode = main([])\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([sys.executable, "-m", "penstock.cli", "models", "org/good"]).returncode == 0


def test_of_a_quantized_one_the_format_and_all_weights_are_told(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "fp8"))
    writer, stored = fp8(32), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored |= writer.write(name, tensor.float())[0] if writer.quantizes(name) else {name: tensor}
    save_file(stored, folder / "model.safetensors")
    change(folder, quantization_config=writer.config)
    quantized, floats = look(folder, "fp8"), look(made, "floats")
    assert quantized.dtype == "FP8 in blocks of 32 x 32"
    assert quantized.parameters == floats.parameters
    assert quantized.weight_bytes is not None
    assert floats.weight_bytes is not None
    assert quantized.weight_bytes < floats.weight_bytes


def test_the_models_in_a_folder(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made, tmp_path / "folder")
    write(tmp_path / "one.gguf", add_model)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/broken.Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "org/name/mmproj-model.gguf").write_bytes(b"GGUF")  # an image encoder is no model
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden/two.gguf", add_model)
    models = {Path(model["name"]).relative_to(tmp_path): model for model in listed(str(tmp_path), capsys=capsys)}
    assert {str(name): (model["architecture"], model["served_by"]) for name, model in models.items()} == {
        "one.gguf": ("LlamaForCausalLM", "own code"),
        "folder": ("LlamaForCausalLM", "own code"),
        "org/name/broken.Q4_K_M.gguf": (None, None),
    }
    assert main([str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([str(tmp_path / "one.gguf")]) == 0
    assert main([str(tmp_path / ".hidden")]) == 0
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "holds neither a checkpoint folder nor a GGUF file" in capsys.readouterr().err


def test_each_gguf_file_has_a_name_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    write(tmp_path / "llama/org_repo_m.gguf", add_model)
    write(tmp_path / "here.gguf", add_model)
    snapshot = tmp_path / "hub/models--org--files" / "snapshots" / COMMITS[0]
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(COMMITS[0])
    for name in ("m-Q8_0.gguf", "m-Q4_K_M.gguf"):
        write(snapshot / name, add_model)
    found = {model["name"]: model["path"] for model in listed(capsys=capsys)[1:]}
    downloads = {f"org/files:{kind}": str(snapshot / f"m-{kind}.gguf") for kind in ("Q4_K_M", "Q8_0")}
    others = (str(tmp_path / "llama/org_repo_m.gguf"), "here.gguf")
    assert found == downloads | {path: path for path in others}
    for name, path in found.items():
        assert listed(name, capsys=capsys)["path"] == path
