"""`penstock quantize`: what it writes, as transformers with the compressed-tensors package reads it, and as we do."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.gpu_worker.formats.made import made
from penstock.kernels.quantized.weight import dequantized
from penstock.lab.commands.plan import read_decoder
from penstock.lab.planning.costs import Costs
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.finding.registry import model_path
from penstock.models.formats.made import HEAD, MADE_FORMATS, MadeFormat, Recipe
from penstock.quantize.__main__ import main
from penstock.quantize.checkpoint import QuantizedCheckpoint, Wanted
from penstock.quantize.safetensors_files import Entry, Job, write

DEMO = model_path(Config())
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
CHAT = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
VARIANTS: dict[str, tuple[str, ...]] = {
    **{format: ("--format", format) for format in MADE_FORMATS},
    **{f"{format}, head": ("--format", format, "--head", "int8") for format in MADE_FORMATS},
    "int4, 128, zero points": ("--format", "int4", "--group-size", "128", "--zero-points"),
    "int4, some": ("--format", "int4", "--ignore", "*.down_proj", "--ignore", "model.layers.0.self_attn.q_proj"),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A name in VARIANTS, and what was written."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    assert main([str(DEMO), str(out), *VARIANTS[request.param]]) == 0
    return request.param, out


def read_by_transformers(folder: Path, **options: Any) -> transformers.PreTrainedModel:
    pytest.importorskip("compressed_tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()  # type: ignore[no-any-return]


def recipe_of(name: str, module: str) -> Recipe | None:
    """What a module was to become."""
    format: MadeFormat = name.partition(",")[0]  # type: ignore[assignment]
    if module == "lm_head":
        return HEAD if "head" in name else None
    if "some" in name and (module.endswith("down_proj") or module == "model.layers.0.self_attn.q_proj"):
        return None
    return Recipe(format, 128 if "128" in name else 32, "zero" in name)


@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_transformers_reads_our_weights(variant: tuple[str, Path]) -> None:
    """Each weight is what ours is dequantized to, bit for bit, and so are those that stay floats."""
    name, folder = variant
    options = {}
    if "zero" in name:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = read_by_transformers(folder, **options)
    source = load_file(DEMO / "model.safetensors")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(CHAT, return_tensors="pt")
    model(**tokens)  # the first pass decompresses
    seen = 0
    for module, its in model.named_modules():
        if isinstance(its, torch.nn.Linear):
            key = f"{module}.weight" if module != "lm_head" else "model.embed_tokens.weight"
            recipe = recipe_of(name, module)
            expected = source[key].float() if recipe is None else dequantized(made(source[key], recipe))
            weight: Tensor = its.weight
            if "zero" in name:  # read so, products of codes and scales are rounded to bf16
                weight, expected = weight.bfloat16(), expected.bfloat16()
            assert torch.equal(weight, expected), module
            seen += 1
    assert seen == 43
    assert torch.equal(model.get_input_embeddings().weight, source["model.embed_tokens.weight"].float())


@pytest.mark.filterwarnings("ignore")
def test_answers_are_transformers(variant: tuple[str, Path]) -> None:
    """Greedy text, of formats that do not round inputs; and we answer from all."""
    name, folder = variant
    with LLM(str(folder), dtype="float32", num_threads=1, num_pages=64) as llm:
        ours = llm.generate(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "keys and values" in ours
    if name.startswith(("int8_weight_only", "int4")) and "zero" not in name:
        model: Any = read_by_transformers(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(CHAT, return_tensors="pt")
        answer = model.generate(**tokens, do_sample=False, temperature=None, top_p=None, max_new_tokens=24)[0]
        assert ours == tokenizer.decode(answer[tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def test_other_files_come_along(variant: tuple[str, Path]) -> None:
    name, folder = variant
    for path in DEMO.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (folder / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((its / "config.json").read_text()) for its in (DEMO, folder))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before | ({"tie_word_embeddings": False} if "head" in name else {})
    assert not list(folder.parent.glob(".*"))


def test_a_plan_knows_its_bytes(variant: tuple[str, Path]) -> None:
    """From config.json alone, what the file has; but for its header, and the shapes that formats store."""
    _, folder = variant
    planned = Costs(read_decoder(str(folder))).weight_bytes
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert planned <= path.stat().st_size - header <= planned + 43 * 16


def test_as_made_at_load(tmp_path: Path) -> None:
    """The same tokens and log-probabilities as with `--quantization`."""
    out = tmp_path / "out"
    assert main([str(DEMO), str(out), "--format", "int4", "--zero-points", "--head", "int8"]) == 0
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    found = []
    for model, quantization in ((out, ""), (DEMO, "int4")):
        with LLM(str(model), dtype="float32", num_threads=1, num_pages=64, quantization=quantization) as llm:
            found.append(llm.generate(CHAT, params, use_tqdm=False)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].cumulative_logprob == pytest.approx(found[1].cumulative_logprob, abs=1e-2)


def test_calibration_makes_better_products(tmp_path: Path) -> None:
    """On a text that was not used for it, the float model's predictions are nearer."""
    from penstock.bench.quality.__main__ import measured
    from penstock.bench.quality.texts import conversations, tokenizer_of
    from penstock.demo.chatml import pieces
    from penstock.demo.corpus import conversations as trained

    text = tmp_path / "text.txt"
    source = trained(7)
    text.write_text("".join(piece for _ in range(60) for piece, _ in pieces(next(source))))
    plain, calibrated = tmp_path / "plain", tmp_path / "calibrated"
    assert main([str(DEMO), str(plain), "--format", "int4"]) == 0
    assert main([str(DEMO), str(calibrated), "--format", "int4", "--calibration", str(text)]) == 0
    texts = conversations(tokenizer_of(HuggingFaceFolder(DEMO)), 2500, 512)
    rows = measured("", texts, [str(plain), str(calibrated)], 512, dtype="float32", num_threads=1)
    assert rows[2].quality.kl < 0.75 * rows[1].quality.kl


def test_large_checkpoints_are_several_files(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(10 * i, 10 * i + 10, dtype=torch.int32) for i in range(5)}
    done: list[Job] = []
    jobs = [
        Job((Entry(name, "I32", (10,)),), lambda its=its: (its.numpy().data.cast("B"),))  # type: ignore[misc]
        for name, its in tensors.items()
    ]
    write(tmp_path, jobs, done.append, most_bytes=80)
    assert done == jobs
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    found: dict[str, Tensor] = {}
    for name in names:
        found |= load_file(tmp_path / name)
    assert all(torch.equal(found[name], its) for name, its in tensors.items())
    assert HuggingFaceFolder(tmp_path).tensors().keys() == tensors.keys()


def test_what_cannot_be_done_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, there = tmp_path / "out", tmp_path / "there"
    there.mkdir()
    (there / "file").touch()
    quantized = tmp_path / "quantized"
    assert main([str(DEMO), str(quantized), "--format", "int8"]) == 0
    capsys.readouterr()
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    for arguments, said in (
        ([str(DEMO), str(there), "--format", "int8"], "exists"),
        ([str(tmp_path / "nothing"), str(out), "--format", "int8"], "no checkpoint folder"),
        ([str(quantized), str(out), "--format", "int8"], "quantized already (compressed-tensors"),
        ([str(DEMO), str(out), "--format", "int8", "--calibration", str(short)], "only with int4"),
        ([str(DEMO), str(out), "--format", "int4", "--calibration", str(short)], "has 4 tokens"),
        ([str(DEMO), str(out), "--format", "int8", "--ignore", "*"], "no matrix"),
        ([str(DEMO), str(out), "--format", "int8", "--ignore", "no.such"], "--ignore no.such: no matrix"),
        ([str(DEMO), str(out), "--format", "int8", "--zero-points"], "--zero-points has no effect with --format int8"),
        ([str(DEMO), str(out), "--format", "fp8", "--group-size", "64"], "--group-size has no effect"),
        ([str(DEMO), str(out), "--format", "int4", "--calibration-tokens", "512"], "without --calibration TEXT"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("penstock quantize: ")
        assert said in error
        assert error.count("\n") == 1
        assert not out.exists()


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        assert main([str(DEMO), str(out), "--format", "int8"]) == 2
    assert "976.6 KiB of the disk are free" in capsys.readouterr().err
    checkpoint = QuantizedCheckpoint(HuggingFaceFolder(DEMO), Wanted(Recipe("int8"), None))

    def fail(job: Job) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.write(out, fail)
    assert list(tmp_path.iterdir()) == []


def test_small_and_transposed_matrices_stay_floats(tmp_path: Path) -> None:
    """GPT-2's are stored transposed, which no reader of compressed-tensors knows."""
    config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, n_positions=64, vocab_size=199)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "gpt2")
    assert main([str(tmp_path / "gpt2"), str(tmp_path / "out"), "--format", "int8"]) == 2


def test_half_precision_and_odd_shapes(tmp_path: Path) -> None:
    """fp16 weights; and groups of 128 do not divide 160 inputs, so those matrices stay as they are."""
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, vocab_size=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    source, out = tmp_path / "source", tmp_path / "out"
    transformers.LlamaForCausalLM(config).half().save_pretrained(source)
    shutil.copy(DEMO / "tokenizer.json", source)
    stored = load_file(source / "model.safetensors")
    save_file(stored, source / "model.safetensors")
    wanted = Wanted(Recipe("int4", 128, has_zeros=False), HEAD)
    checkpoint = QuantizedCheckpoint(HuggingFaceFolder(source), wanted)
    checkpoint.write(out, lambda job: None)
    written = load_file(out / "model.safetensors")
    down = "model.layers.0.mlp.down_proj"
    assert torch.equal(written[f"{down}.weight"], stored[f"{down}.weight"])
    assert down in checkpoint.config["quantization_config"]["ignore"]
    assert written["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float16
    assert written["lm_head.weight_packed"].shape == (4096, 32)
    with LLM(str(out), dtype="float32", num_threads=1, num_pages=16) as llm:
        assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) > 0
