"""Families that see images, through real processes: what the frontend makes of pictures is what the worker takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from tests.e2e.servers import serving
from tests.e2e.test_images import messages, told
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import greedy_errors
from tests.internal_fields import internal
from tests.parts.images.image_models import MODELS, ImageModel, data_url, encoded, noise

PICTURES = [noise(90, 60, seed=1), noise(40, 130, seed=2)]
URLS = [data_url(encoded(picture)) for picture in PICTURES]

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.12,
}  # fmt: skip
_TILE: dict[str, Any] = {
    "image_size": 56, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "initializer_range": 0.12,
}  # fmt: skip
_CLIP = {**_TILE, "model_type": "clip_vision_model"}
_SIGLIP = {**_TILE, "model_type": "siglip_vision_model", "vision_use_head": False}
_SQUARES: dict[str, Any] = {**_TILE, "image_size": 64, "patch_size": 8}
_PIXTRAL: dict[str, Any] = {**_TILE, "model_type": "pixtral", "image_size": 168}
_GRID: dict[str, Any] = {
    "depth": 3, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 16,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2], "initializer_range": 0.12,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


class Family(NamedTuple):
    """How transformers is asked for it."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    more: Callable[[ImageModel, Any], Mapping[str, Any]] = lambda family, tokenizer: {}  # of the configuration
    inputs: Callable[[Any, Tensor, Tensor], dict[str, Any]] = lambda made, ids, is_image: {}  # beside pixel values
    kind: str = ""  # transformers' name of the model, if the processor has another one
    arguments: Mapping[str, Any] = MappingProxyType({})  # with which its processor calls that of images


def _qwen3_tokens(family: ImageModel, tokenizer: Any) -> Mapping[str, Any]:
    named = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in named.items()}


def _scale(family: ImageModel, tokenizer: Any) -> Mapping[str, Any]:
    return {"scale_factor": 4, "pad_token_id": tokenizer.pad_token_id}


def _sizes(made: Any, ids: Tensor, is_image: Tensor) -> dict[str, Any]:
    return {"image_sizes": made["image_sizes"]}


FAMILIES = {
    "qwen3-vl": Family(
        {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS},
        _GRID,
        _qwen3_tokens,
        lambda made, ids, is_image: {"image_grid_thw": made["image_grid_thw"], "mm_token_type_ids": is_image},
    ),
    "llava": Family({**_TEXT, "model_type": "llama"}, _CLIP),
    "llava-next": Family(
        {**_TEXT, "model_type": "llama"},
        _CLIP,
        lambda family, tokenizer: {"image_grid_pinpoints": family.image["image_grid_pinpoints"]},
        lambda made, ids, is_image: {"image_sizes": made["image_sizes"]},
    ),
    "gemma3": Family(
        {**_TEXT, "model_type": "gemma3_text", "sliding_window": 24, "num_hidden_layers": 6},
        _SIGLIP,
        lambda family, tokenizer: {"mm_tokens_per_image": 4},
        lambda made, ids, is_image: {"token_type_ids": is_image},
    ),
    "idefics3": Family({**_TEXT, "model_type": "llama"}, _SQUARES, _scale),
    "smolvlm": Family({**_TEXT, "model_type": "llama"}, _SQUARES, _scale),
    "pixtral": Family(
        {**_TEXT, "model_type": "mistral"},
        {**_PIXTRAL, "patch_size": 16},
        lambda family, tokenizer: {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        _sizes,
        kind="llava",
    ),
    "mistral3": Family(
        {**_TEXT, "model_type": "mistral"}, _PIXTRAL, inputs=_sizes, kind="mistral3", arguments={"patch_size": 28}
    ),
}
PLACEHOLDERS = {
    "qwen3-vl": "<|image_pad|>",
    "llava": "<image>",
    "llava-next": "<image>",
    "gemma3": "<image_soft_token>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
}


def make_model(folder: Path, name: str) -> tuple[Any, int]:
    """transformers' model of a checkpoint with random weights, and the token of images."""
    family, its = MODELS[name], FAMILIES[name]
    tokenizer = family.tokenizer()
    family.write(folder)
    token = tokenizer.convert_tokens_to_ids(PLACEHOLDERS.get(name, "<image>"))
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = {**its.text, "vocab_size": len(tokenizer), "eos_token_id": eos}
    make: Any = transformers.CONFIG_MAPPING[its.kind or family.module]
    image = {"image_token_id" if name in ("qwen3-vl", "gemma3", "idefics3", "smolvlm") else "image_token_index": token}
    config = make(
        text_config=text, vision_config=dict(its.vision), tie_word_embeddings=False, eos_token_id=eos, **image,
        **its.more(family, tokenizer),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model, token


class Seen:
    """A model of texts, to which these pictures belong."""

    def __init__(self, name: str, model: Any, token: int, pictures: list[Image.Image]) -> None:
        self._inputs, self._model, self._token = FAMILIES[name].inputs, model, token
        given = [pictures] if name in ("idefics3", "smolvlm") else pictures  # those of each text in a list
        self._made = MODELS[name].make_image_processor()(given, return_tensors="pt", **FAMILIES[name].arguments)

    def __call__(self, ids: Tensor) -> Any:
        more = self._inputs(self._made, ids, (ids == self._token).long())
        return self._model(ids, pixel_values=self._made["pixel_values"], **more)


_OVER_RANKS = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize("more", [(), _OVER_RANKS, (*_OVER_RANKS, "--cpu-kernels", "torch")] if IS_SOAK else [()])
@pytest.mark.parametrize("name", FAMILIES if IS_SOAK else ["gemma3", "mistral3"])
async def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    model, token = make_model(tmp_path / "m", name)
    flags = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "128", *more)
    checks = internal(check_ranks=True)
    async with serving(tmp_path / "m", *flags, **checks) as server, aiohttp.ClientSession() as http:
        for urls, pictures in ((URLS, PICTURES), (URLS[1:], PICTURES[1:])):
            prompt, ids = await told(http, server, messages(*urls))
            assert token in prompt
            seen: Any = Seen(name, model, token, pictures)
            assert ids
            assert greedy_errors(seen, prompt, ids)[0] == []
