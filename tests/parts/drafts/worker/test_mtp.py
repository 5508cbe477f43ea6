"""Layers in a checkpoint that predict further tokens: what they guess, compared with transformers' own layer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from penstock.config import ConfigError
from penstock.parts.drafts.checkpoints.check import check_drafter
from tests.gpu_worker.checkpoints import edit_config
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config, schedule
from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import make_model
from tests.parts.drafts.worker.engines import GREEDY, PROMPTS, check_exact, spied

Make = Callable[..., Checkpoint]
MTP = {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}'}
CASES = {
    "glm4_moe": Case("glm4_moe", {"num_hidden_layers": 3, "use_qk_norm": True}),
    "deepseek_v3": Case(
        "deepseek_v3", {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 8, "n_group": 4, "topk_group": 2}
    ),
    "glm_moe_dsa": Case(
        "glm_moe_dsa",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "indexer_types": ["full"] * 3,
            "index_n_heads": 12,
            "index_head_dim": 24,
            "index_topk": 7,
            "first_k_dense_replace": 1,
        },
    ),
}
_LAST = 2


def write(folder: Path, name: str) -> tuple[transformers.PreTrainedModel, nn.Module, dict[str, Tensor]]:
    """A model whose last layer predicts further tokens: returns the model without it, the layer, and its tensors."""
    model = make_model(CASES[name])
    model.save_pretrained(folder)
    kinds = {name: its[:_LAST] for name, its in vars(model.config).items() if name.endswith("_types") and its}
    edit_config(folder, num_hidden_layers=_LAST, num_nextn_predict_layers=1, **kinds)
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(4)
    own = {each: 1 + torch.randn(hidden, generator=generator) * 0.2 for each in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
    begin = f"model.layers.{_LAST}."
    stored = load_file(folder / "model.safetensors") | {f"{begin}{each}.weight": its for each, its in own.items()}
    stored[f"{begin}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"{begin}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    layer = model.model.layers[_LAST]
    model.model.layers = model.model.layers[:_LAST]
    model.config.num_hidden_layers = _LAST
    return model, layer, own


@torch.inference_mode()
def mtp_guesses(
    model: transformers.PreTrainedModel, layer: nn.Module, own: dict[str, Tensor], text: list[int], count: int
) -> list[int]:
    """What the layer guesses greedily after a text of which the model knows all but the last token."""
    table, output = (model.state_dict()[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    eps = model.config.rms_norm_eps
    given = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    tokens = list(text)
    for _ in range(count):
        size = given.shape[0]
        embedded = functional.rms_norm(table[torch.tensor(tokens[1:])], (given.shape[1],), own["enorm"], eps)
        pair = torch.cat((embedded, functional.rms_norm(given, (given.shape[1],), own["hnorm"], eps)), dim=1)
        x, positions = functional.linear(pair, own["eh_proj"])[None], torch.arange(size)[None]
        made = layer(
            x,
            attention_mask=torch.full((1, 1, size, size), float("-inf")).triu(1),
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, positions),
        )
        made = made[0] if isinstance(made, tuple) else made
        last = made.view(size, -1)[-1]
        tokens.append(int((output @ functional.rms_norm(last, last.shape, own["shared_head.norm"], eps)).argmax()))
        given = torch.cat((given, last[None]))
    return tokens[len(text) :]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_guesses_are_those_of_the_layer(tmp_path: Path, name: str, kernels: str) -> None:
    model, layer, own = write(tmp_path, name)
    options = schedule(48, 16, 1, num_tokens=3200) | {"cpu_kernels": kernels}
    engine = Engine(tmp_path, **options, **MTP)
    noted = spied(engine)
    assert engine.run(PROMPTS, GREEDY) == Engine(tmp_path, **options).run(PROMPTS, GREEDY)
    assert noted
    for text, guesses in noted[::5]:
        assert guesses
        assert guesses == mtp_guesses(model, layer, own, text, len(guesses))


def test_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe")
    options = schedule(40, 4, 1, num_tokens=104, cached=True)
    check_exact(Engine(tmp_path, **options), Engine(tmp_path, **options, **MTP))


def test_checkpoints_without_such_a_layer_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layer that predicts further tokens"):
        check_drafter(make_config(checkpoint("llama")[0], **MTP))
    write(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: its for name, its in tensors.items() if "eh_proj" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the checkpoint cannot be used with mtp: it lacks model.layers.2.eh_proj"):
        check_drafter(make_config(tmp_path, **MTP))
    with pytest.raises(ConfigError, match="model has no effect with method mtp"):
        make_config(tmp_path, speculative_config='{"method": "mtp", "model": "x"}')
