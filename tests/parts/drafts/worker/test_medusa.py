"""Medusa's heads: what they guess, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from penstock.config import ConfigError
from penstock.parts.drafts.checkpoints.check import check_drafter
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.eagle_heads import count_up, forget_context, write_head
from tests.parts.drafts.worker.engines import GREEDY, PROMPTS, check_steps, spied, with_head
from tests.parts.drafts.worker.medusa_heads import CONFIG, NUM_BLOCKS, NUM_HEADS, heads

Make = Callable[..., Checkpoint]


def as_in_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in the other layout."""
    renamed = {}
    for name, tensor in tensors.items():
        head, place, *rest = name.split(".")
        to = f"blocks.{head}.layers.{place}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head}.weight"
        renamed[to] = tensor
    return renamed


@torch.inference_mode()
def medusa_guesses(model: transformers.PreTrainedModel, tensors: dict[str, Tensor], text: list[int]) -> list[int]:
    """The greedy guesses after a text of which the model knows all but the last token."""
    last = model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
    guesses = []
    for head in range(NUM_HEADS):
        x = last
        for block in range(NUM_BLOCKS):
            weight, bias = (tensors[f"{head}.{block}.linear.{name}"] for name in ("weight", "bias"))
            x = x + functional.silu(functional.linear(x, weight, bias))
        guesses.append(int((tensors[f"{head}.{NUM_BLOCKS}.weight"] @ x).argmax()))
    return guesses


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("layout", ["medusa", "vllm", "prefixed"])
def test_guesses_are_those_of_the_layout(checkpoint: Make, tmp_path: Path, kernels: str, layout: str) -> None:
    folder, model = checkpoint("llama")
    tensors = heads(model)
    sizes = {"hidden_size": 64, "vocab_size": 199, "num_heads": NUM_HEADS, "num_hidden_layers": NUM_BLOCKS}
    if layout == "vllm":
        write_head(tmp_path, as_in_vllm(tensors), {"model_type": "medusa", **sizes})
    else:
        prefix = "medusa_head." if layout == "prefixed" else ""
        write_head(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()}, CONFIG)
    engine = Engine(folder, cpu_kernels=kernels, **with_head(tmp_path, NUM_HEADS, "medusa"))
    noted = spied(engine)
    engine.run(PROMPTS, GREEDY)
    assert any(len(guesses) == NUM_HEADS for _, guesses in noted)
    for text, guesses in noted[::5]:
        assert guesses
        assert guesses == medusa_guesses(model, tensors, text)[: len(guesses)]


def test_heads_share_outputs_and_name_some_tokens_only(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    tensors = as_in_vllm(heads(model))
    named = torch.randperm(199, generator=torch.Generator().manual_seed(1))[:40]
    common = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_heads")}
    config = {"original_lm_head": True, "truncated_vocab_size": 40, "hidden_size": 64, "vocab_size": 199}
    write_head(
        tmp_path,
        common | {"lm_head.weight": tensors["lm_heads.0.weight"][named], "token_map": named},
        config,
    )
    engine = Engine(folder, **with_head(tmp_path, 2, "medusa"))
    noted = spied(engine)
    engine.run(PROMPTS, GREEDY)
    assert {token for _, guesses in noted for token in guesses} <= set(named.tolist())
    write_head(
        tmp_path, common | {"lm_head.weight": tensors["lm_heads.0.weight"][named], "token_map": named + 160}, config
    )
    with pytest.raises(ConfigError, match="does not name 40 different tokens of this model's 199"):
        check_drafter(make_config(folder, **with_head(tmp_path, 2, "medusa")))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_right_heads_are_right(tmp_path: Path, checkpoint: Make, kernels: str) -> None:
    _, model = checkpoint("llama", num_hidden_layers=1)
    changed = type(model)(model.config)
    changed.load_state_dict(model.state_dict())
    forget_context(changed)
    count_up(changed)
    changed.save_pretrained(tmp_path / "model")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in heads(model).items()}
    for head in range(NUM_HEADS):
        tensors[f"{head}.{NUM_BLOCKS}.weight"] = changed.state_dict()["lm_head.weight"].roll(1 + head, 0)
    write_head(tmp_path / "head", tensors, CONFIG)
    plain = Engine(tmp_path / "model", cpu_kernels=kernels)
    engine = Engine(tmp_path / "model", cpu_kernels=kernels, **with_head(tmp_path / "head", 3, "medusa"))
    check_steps(plain, engine, 3)


def with_tree(head: Path, tree: str, count: int) -> dict[str, str]:
    config = {"method": "medusa", "model": str(head), "num_speculative_tokens": count, "speculative_token_tree": tree}
    return {"speculative_config": json.dumps(config)}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_right_path_of_a_tree_is_taken(tmp_path: Path, checkpoint: Make, kernels: str) -> None:
    """Heads whose second token is right: a step brings as many tokens as they are, and the hidden states move along."""
    _, model = checkpoint("llama", num_hidden_layers=1)
    changed = type(model)(model.config)
    changed.load_state_dict(model.state_dict())
    forget_context(changed)
    count_up(changed)
    changed.save_pretrained(tmp_path / "model")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in heads(model).items()}
    for head in range(NUM_HEADS):
        right = changed.state_dict()["lm_head.weight"].roll(1 + head, 0)
        # The token after the right one gets a little more than it: it comes first.
        tensors[f"{head}.{NUM_BLOCKS}.weight"] = right + 1.5 * right.roll(1, 0)
    write_head(tmp_path / "head", tensors, CONFIG)
    tree = "[(0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)]"
    plain = Engine(tmp_path / "model", cpu_kernels=kernels)
    engine = Engine(tmp_path / "model", cpu_kernels=kernels, **with_tree(tmp_path / "head", tree, 6))
    assert engine.hello.max_drafts == 6
    drafting_of(engine.scheduler).lengths = FixedLengths(6)
    assert engine.run(PROMPTS, GREEDY) == plain.run(PROMPTS, GREEDY)
    # At the end of a request fewer nodes are guessed than the path needs.
    assert engine.scheduler.totals.num_steps <= 4 + plain.scheduler.totals.num_steps // 4


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("[(0,), (1, 0)]", r"a node \(1, 0\), but not its parent \(1,\)"),
        ("[]", "1 to 64 nodes"),
        ("[(0,), (0,)]", "all different"),
        ("[(-1,)]", "ranks are from 0 to 63"),
        ("wide", "neither 'likeliest' nor a list of tuples"),
        ("[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]", "3 heads, too few for a speculative_token_tree of depth 4"),
        ("[(0,)]", "num_speculative_tokens 4: speculative_token_tree has 1 nodes"),
    ],
)
def test_wrong_trees_are_refused(checkpoint: Make, tmp_path: Path, tree: str, said: str) -> None:
    folder, model = checkpoint("llama")
    write_head(tmp_path, heads(model), CONFIG)
    with pytest.raises(ConfigError, match=said):
        check_drafter(make_config(folder, **with_tree(tmp_path, tree, 4)))


def test_wrong_heads_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    tensors = heads(model)

    def refused(said: str, tensors: dict[str, Tensor], count: int = 3) -> None:
        write_head(tmp_path, tensors, CONFIG)
        with pytest.raises(ConfigError, match=said):
            check_drafter(make_config(folder, **with_head(tmp_path, count, "medusa")))

    refused("it has 3 heads, which cannot guess num_speculative_tokens 4", tensors, 4)
    refused("it lacks lm_head.weight", {name: each for name, each in tensors.items() if name != "1.2.weight"})
    refused("no tensors of Medusa's heads", {"fc.weight": torch.ones(2, 2)})
    wide = {
        name: torch.ones(*(2 * size if size == 64 else size for size in its.shape)) for name, its in tensors.items()
    }
    refused("hidden size of 128; this model's is 64", wide)
    few = tensors | {"0.2.weight": torch.ones(100, 64)}
    refused(r"lm_heads.0.weight has shape \[100, 64\], but should have \[199, 64\]", few)
