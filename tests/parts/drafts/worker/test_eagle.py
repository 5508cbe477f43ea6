"""EAGLE heads: what they guess, and what is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from penstock.config import ConfigError
from penstock.core.steps.drafts import DraftRoom
from penstock.ipc.messages import SamplingParams
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary
from penstock.parts.drafts.checkpoints.check import check_drafter
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from penstock.parts.drafts.worker.heads.eagle import NUM_KEPT, HeadDrafter
from penstock.parts.grammars.child.read import read_grammar
from tests.e2e.checkpoints import make_checkpoint as make_byte_checkpoint
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config, schedule
from tests.parts.drafts.drafters import drafter_of
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.eagle_heads import (
    eagle_guesses,
    forget_context,
    write_eagle,
    write_eagle3,
    write_right_eagle,
)
from tests.parts.drafts.worker.engines import (
    GREEDY,
    NUM_NEW,
    PROMPTS,
    SAMPLING,
    SHORT,
    check_steps,
    spied,
    with_head,
)

Make = Callable[..., Checkpoint]


NAMED = torch.arange(1, 199, 2)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(("budget", "named"), [(512, None), (24, None), (512, NAMED)])
def test_guesses_are_those_of_the_layout(
    checkpoint: Make, tmp_path: Path, kernels: str, budget: int, named: torch.Tensor | None
) -> None:
    folder, model = checkpoint("llama")
    write_eagle(tmp_path, model, has_bias=budget == 24, named=named)
    head = load_file(tmp_path / "model.safetensors")
    options = schedule(budget, 16, 1, num_tokens=3200) | {"cpu_kernels": kernels}
    engine = Engine(folder, **options, **with_head(tmp_path))
    noted = spied(engine)
    engine.run(PROMPTS, GREEDY)
    assert len(noted) >= len(PROMPTS) * NUM_NEW // 4
    for text, guesses in noted[::5]:
        assert guesses
        assert guesses == eagle_guesses(model, head, text, len(guesses))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_one_native_call_guesses_what_several_do(checkpoint: Make, tmp_path: Path, method: str) -> None:
    """Rows that may have different numbers of guesses, each with noise of its own; then with gaps."""
    folder, model = checkpoint("llama")
    if method == "eagle":
        write_eagle(tmp_path, model, named=NAMED)
    else:
        write_eagle3(tmp_path, model, NAMED, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    sampling = [
        replace(each, max_drafts=most, max_tokens=3 * NUM_NEW)
        for each, most in zip(SAMPLING, (2, -1, 0, 3), strict=True)
    ]
    found = []
    for is_native in (True, False):
        engine = Engine(folder, **schedule(48, 16, 1, num_tokens=3200), **with_head(tmp_path, 5, method))
        noted = spied(engine)
        drafter: Any = drafter_of(engine.runner)
        head = drafter._drafter
        assert isinstance(head, HeadDrafter)
        assert head._native is not None
        if not is_native:
            head._native = None
        outputs = engine.run(PROMPTS, sampling)
        drafting_of(engine.scheduler).lengths = Seldom(20)
        found.append((outputs, engine.run(SHORT, sampling), noted))
    assert found[0] == found[1]
    assert {len(guesses) for _, guesses in found[0][2]} > {2, 3, 5}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_right_head_is_right(tmp_path: Path, checkpoint: Make, kernels: str) -> None:
    _, model = checkpoint("llama", num_hidden_layers=1)
    changed = type(model)(model.config)
    changed.load_state_dict(model.state_dict())
    forget_context(changed)
    changed.save_pretrained(tmp_path / "model")
    write_right_eagle(tmp_path / "head", changed)
    plain = Engine(tmp_path / "model", cpu_kernels=kernels)
    check_steps(plain, Engine(tmp_path / "model", cpu_kernels=kernels, **with_head(tmp_path / "head")), 3)


class Seldom(FixedLengths):
    """Lets guess in one of so many steps."""

    def __init__(self, interval: int) -> None:
        super().__init__(3)
        self._interval, self._step = interval, 0

    def lengths(self, decodes: Sequence[Any], room: DraftRoom) -> Sequence[int]:
        self._step += 1
        return [] if self._step % self._interval else super().lengths(decodes, room)


@pytest.mark.parametrize("interval", [30, 90])
def test_guesses_pause(checkpoint: Make, tmp_path: Path, interval: int) -> None:
    """A head catches up with what is kept of a row; after a longer pause it has a gap, and guesses what it can."""
    folder, model = checkpoint("llama")
    write_eagle(tmp_path, model)
    head, params = load_file(tmp_path / "model.safetensors"), replace(GREEDY, max_tokens=200)
    plain, engine = Engine(folder), Engine(folder, **with_head(tmp_path))
    noted = spied(engine)
    drafting_of(engine.scheduler).lengths = Seldom(interval)
    assert engine.run(PROMPTS[:2], params) == plain.run(PROMPTS[:2], params)
    assert len(noted) >= 2 * (200 // interval)
    assert all(guesses for _, guesses in noted)
    if interval < NUM_KEPT:
        assert all(guesses == eagle_guesses(model, head, text, len(guesses)) for text, guesses in noted)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_with_a_form(tmp_path: Path, depth: int) -> None:
    """Beside guesses there are tokens that the form forces, and guesses that it forbids."""
    model = make_byte_checkpoint(tmp_path / "model")
    write_eagle(tmp_path / "head", model)
    vocabulary = grammar_vocabulary(open_checkpoint(tmp_path / "model"))
    grammar = read_grammar(vocabulary, "json", json.dumps({"enum": ["one", "two", "three"]})).text
    sampling = [
        SamplingParams(max_tokens=12, grammar=grammar, stop_token_ids=(2,), seed=3),
        SamplingParams(max_tokens=12, seed=4),
        SamplingParams(max_tokens=12, grammar=grammar, stop_token_ids=(2,), temperature=0.0),
    ]
    texts = [[1, 50, 60, 70 + i] for i in range(3)]
    expected = Engine(tmp_path / "model", pipeline_depth=depth).run(texts, sampling)
    engine = Engine(tmp_path / "model", pipeline_depth=depth, **with_head(tmp_path / "head"))
    noted = spied(engine)
    assert engine.run(texts, sampling) == expected
    assert noted


def test_wrong_heads_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")

    def refused(said: str, head: Path = tmp_path, **options: Any) -> None:
        config = make_config(folder, **with_head(head), **options)
        with pytest.raises(ConfigError, match=said):
            check_drafter(config)

    def changed(**changes: Any) -> None:
        write_eagle(tmp_path, model, **changes)

    changed()
    check_drafter(make_config(folder, **with_head(tmp_path)))
    refused("single worker", tensor_parallel_size=2)
    refused("no such folder|no checkpoint folder", tmp_path / "nowhere")
    changed(hidden_size=128)
    refused("hidden size of 128; this model's is 64")
    changed(vocab_size=1000)
    refused("vocabulary of 1000; this model's is 199")
    changed(intermediate_size=96)
    refused(r"gate_proj.weight has shape \[80, 64\], but should have \[96, 64\]")
    changed(named=torch.tensor([3, 3, 199]))
    refused("its d2t does not name 3 different tokens of this model's 199")
    changed(architectures=["MambaForCausalLM"])
    refused("architecture MambaForCausalLM; heads with layers of these are supported: Llama")
    changed()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "fc" not in name}, tmp_path / "model.safetensors")
    refused("it lacks fc.weight")
    save_file(tensors | {"layers.1.mlp.up_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    refused("it has layers.1.mlp.up_proj.weight, which a head of method eagle has not")
