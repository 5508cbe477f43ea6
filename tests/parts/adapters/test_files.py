"""What cannot be served as it was trained is refused in a sentence, and harms nobody."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.adapters.test_parity import gate_of, load, run
from tests.parts.adapters.written import change_config, change_tensors, write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
_EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
[PROMPT] = prompts((20,), seed=5)


def _with_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: change_config(folder, **changes)


def _with_tensors(change_all: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: change_tensors(folder, change_all)


def _first(tensors: dict[str, torch.Tensor], which: str) -> str:
    return next(name for name in tensors if f"lora_{which}" in name)


def _pair(module: str, rank: int = 4) -> dict[str, torch.Tensor]:
    names = (f"base_model.model.{module}.lora_{which}.weight" for which in "AB")
    return dict(zip(names, (torch.zeros(rank, 64), torch.zeros(199, rank)), strict=True))


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("q_proj", "r_proj")] = tensors.pop(name)


def _cut_file(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:200])


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "another method": (_with_config(peft_type="IA3"), "'IA3'"),
    "magnitudes": (_with_config(use_dora=True), "use_dora"),
    "biases": (_with_config(bias="all"), "bias 'all'"),
    "whole modules": (_with_config(modules_to_save=["lm_head"]), "modules_to_save ('lm_head')"),
    "tokens": (_with_config(trainable_token_indices={"embed_tokens": [3]}), "trainable_token_indices ('embed_tokens')"),
    "experts": (_with_config(target_parameters=["experts.down_proj"]), "target_parameters ('experts.down_proj')"),
    "weights changed at the beginning": (_with_config(init_lora_weights="pissa_niter_4"), "'pissa_niter_4'"),
    "the head": (_with_tensors(lambda tensors: tensors.update(_pair("lm_head"))), "it changes 'lm_head'"),
    "a config that is none": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "a broken config": (lambda folder: folder.joinpath("adapter_config.json").write_text("{"), "understood"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "cut off": (_cut_file, "damaged"),
    "a module of another model": (_with_tensors(_rename), "r_proj"),
    "half a pair": (_with_tensors(lambda tensors: tensors.pop(_first(tensors, "B"))), "missing"),
    "other sizes": (
        _with_tensors(lambda tensors: tensors.update({_first(tensors, "B"): torch.zeros(7, 4)})), "another model",
    ),
    "a vector": (
        _with_tensors(lambda tensors: tensors.update({_first(tensors, "A"): torch.zeros(4)})), "shapes [4] and [",
    ),
    "a single number": (
        _with_tensors(lambda tensors: tensors.update({_first(tensors, "A"): torch.tensor(1.0)})), "shapes [] and [",
    ),
    "a rank of 0": (
        _with_tensors(lambda tensors: tensors.update(_pair("model.layers.0.self_attn.q_proj", 0))),
        "shapes [0, 64] and [199, 0]",
    ),
    "a scale beyond all numbers": (_with_config(lora_alpha=1e300), "not finite"),
    "a pattern that is none": (_with_config(alpha_pattern={"(": 3}), "no regular expression"),
    "no numbers": (
        _with_tensors(lambda tensors: tensors[_first(tensors, "A")].fill_(float("nan"))), "not finite",
    ),
    "embeddings": (
        _with_tensors(lambda tensors: tensors.update({_EMBEDDING: torch.zeros(4, 4)})),
        "only those of linear layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_refused(checkpoint: Make, tmp_path: Path, harm: str) -> None:
    """The request that waits for it ends with the reason; later ones are refused; others go on."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native")
    write_adapter(tmp_path / "good", model)
    write_adapter(tmp_path / "bad", model)
    do, why = HARM[harm]
    do(tmp_path / "bad")
    keys = [load(engine, "good", tmp_path / "good")]
    [expected] = run(engine, [(PROMPT, keys[0])])
    keys.append(load(engine, "bad", tmp_path / "bad"))
    good, bad = (engine.add(PROMPT, SamplingParams(max_tokens=12, temperature=0.0), adapter=key) for key in keys)
    errors = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.finish_reason == "error":
                errors[delta.request_id] = delta.error
            else:
                engine.outputs[delta.request_id, 0].extend(delta.token_ids)
    assert engine.outputs[good, 0] == expected
    assert errors.keys() == {bad}
    assert why in errors[bad]
    assert gate_of(engine).known[keys[1]].state == "failed"
    with pytest.raises(ValueError, match="cannot be used"):
        engine.add(PROMPT, SamplingParams(max_tokens=1), adapter=keys[1])


def test_an_adapter_that_nobody_has_named(checkpoint: Make) -> None:
    engine = Engine(checkpoint("llama")[0], cpu_kernels="native")
    with pytest.raises(ValueError, match="does not have"):
        engine.add(PROMPT, SamplingParams(max_tokens=1), adapter="unknown@1")
