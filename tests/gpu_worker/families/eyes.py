"""Small models that take images: their configurations, what their processors make of pictures, and what they get."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.recurrent import DELTA

IMAGE, BEGIN, END, BETWEEN = 190, 191, 192, 193
_SIZES = ((16, 24), (40, 8), (24, 24))
"""Of the pictures: rows and columns of pixels."""


class Picture(NamedTuple):
    """What the processor makes of one."""

    pixels: Tensor
    grid: tuple[int, ...]
    num_embeddings: int
    num_runs: int = 1  # of placeholders, with a token between two of them

    @property
    def places(self) -> list[int]:
        """Its part of a prompt."""
        run = [IMAGE] * (self.num_embeddings // self.num_runs)
        return [*run, *[BETWEEN, *run] * (self.num_runs - 1)]


def _drawn() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in _SIZES]


def _qwen_pictures() -> list[Picture]:
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    made = []
    for drawn in _drawn():
        of_one = processor(drawn, return_tensors="pt")
        rows, columns = of_one["image_grid_thw"][0, 1:].tolist()
        made.append(Picture(of_one["pixel_values"].float(), (1, rows, columns), rows * columns // 4))
    return made


def _qwen_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.cat([picture.pixels for picture in pictures]),
        "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
        "mm_token_type_ids": torch.tensor([[int(token == IMAGE) for token in text]]),
    }


def _clip_pictures() -> list[Picture]:
    processor = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    made = [processor(drawn, return_tensors="pt")["pixel_values"].float() for drawn in _drawn()]
    return [Picture(pixels, (12, 12), 9) for pixels in made]


def _whole_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat([picture.pixels for picture in pictures])}


_RESOLUTIONS = [[12, 24], [24, 12], [24, 24]]


def _llava_next_pictures() -> list[Picture]:
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}, image_grid_pinpoints=_RESOLUTIONS
    )
    first, second, third = _drawn()
    narrow = second[:, :2]  # so that of its tiles nothing is kept but the ends of rows
    made = [processor(drawn, return_tensors="pt") for drawn in (first, narrow, third)]
    counts = (6 * 9 + 16, 8 * 1 + 16, 8 * 9 + 16)
    return [
        Picture(of_one["pixel_values"].float(), tuple(of_one["image_sizes"][0].tolist()), count)
        for of_one, count in zip(made, counts, strict=True)
    ]


def _llava_next_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    most = max(picture.pixels.shape[1] for picture in pictures)
    padded = [functional.pad(its.pixels, (0, 0) * 3 + (0, most - its.pixels.shape[1])) for its in pictures]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor([picture.grid for picture in pictures])}


def _gemma3_pictures() -> list[Picture]:
    processor = Gemma3ImageProcessorPil(size={"height": 12, "width": 12})
    made = [processor(drawn, return_tensors="pt")["pixel_values"].float() for drawn in _drawn()]
    return [Picture(pixels, (0,), 4) for pixels in made]


def _gemma3_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    types = torch.tensor([[int(token == IMAGE) for token in text]])
    return {"pixel_values": torch.cat([picture.pixels for picture in pictures]), "token_type_ids": types}


def _idefics3_pictures() -> list[Picture]:
    made = []
    for drawn, longest in zip(_drawn(), (24, 24, 12), strict=True):
        processor = Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": 12})
        of_one = processor.preprocess([[drawn]], return_tensors="pt", return_row_col_info=True)
        rows, columns = of_one["rows"][0][0], of_one["cols"][0][0]
        num_tiles = rows * columns + 1
        made.append(Picture(of_one["pixel_values"].float(), (rows, columns), 4 * num_tiles, num_tiles))
    return made


def _idefics3_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat([picture.pixels for picture in pictures], dim=1)}


def _pixtral_pictures(patch: int) -> list[Picture]:
    """`patch`: pixels on the side of what becomes one embedding."""
    processor = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=patch)
    made = []
    for drawn in _drawn():
        of_one = processor(drawn, return_tensors="pt")
        height, width = (int(size) for size in of_one["image_sizes"][0])
        rows, columns = height // patch, width // patch
        made.append(Picture(of_one["pixel_values"].float(), (height, width), rows * columns, rows))
    return made


def _pixtral_inputs(pictures: tuple[Picture, ...], text: list[int]) -> dict[str, Tensor]:
    height, width = (max(picture.grid[side] for picture in pictures) for side in (0, 1))
    padded = [functional.pad(its.pixels, (0, width - its.grid[1], 0, height - its.grid[0])) for its in pictures]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor([picture.grid for picture in pictures])}


class Eyes(NamedTuple):
    """A family."""

    kind: str  # transformers' name
    vision: Mapping[str, Any]
    case: Case  # of the text part
    pictures: Callable[[], list[Picture]] = _qwen_pictures
    inputs: Callable[[tuple[Picture, ...], list[int]], dict[str, Tensor]] = _qwen_inputs
    more: Mapping[str, Any] = MappingProxyType({})  # of the whole model's configuration


_SECTIONS = rope("default", mrope_section=[2, 3, 3])
_SMALL = {"depth": 3, "num_heads": 2, "patch_size": 4, "in_channels": 3}
_TILE = {"image_size": 12, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}
_TILE |= {"num_hidden_layers": 4, "num_attention_heads": 2}
_SQUARES = {**_TILE, "patch_size": 3, "num_hidden_layers": 3}
_PIXTRAL = {**_TILE, "model_type": "pixtral", "image_size": 32, "hidden_act": "silu"}
_CLIP = {**_TILE, "model_type": "clip_vision_model"}
_QWEN3 = {
    **_SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN3_5 = {name: value for name, value in _QWEN3.items() if name != "deepstack_visual_indexes"}
_DELTA = {**DELTA, **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)}

EYES: dict[str, Eyes] = {
    "qwen2-vl": Eyes("qwen2_vl", {**_SMALL, "embed_dim": 32, "hidden_size": 64}, Case("qwen2_vl_text", _SECTIONS)),
    "qwen2.5-vl": Eyes(
        "qwen2_5_vl",
        {
            **_SMALL,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        Case("qwen2_5_vl_text", _SECTIONS),
    ),
    "qwen3-vl": Eyes(
        "qwen3_vl",
        _QWEN3,
        Case("qwen3_vl_text", rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)),
    ),
    "llava": Eyes("llava", _CLIP, Case("llama"), _clip_pictures, _whole_inputs),
    "gemma3": Eyes(
        "gemma3",
        {**_TILE, "patch_size": 3, "model_type": "siglip_vision_model", "vision_use_head": False},
        Case("gemma3_text", {"num_hidden_layers": 6}),
        _gemma3_pictures,
        _gemma3_inputs,
        {"mm_tokens_per_image": 4},
    ),
    "llava-next": Eyes(
        *("llava_next", {**_CLIP, "patch_size": 3}, Case("llama"), _llava_next_pictures, _llava_next_inputs),
        {"image_grid_pinpoints": _RESOLUTIONS},
    ),
    "idefics3": Eyes("idefics3", _SQUARES, Case("llama"), _idefics3_pictures, _idefics3_inputs),
    "smolvlm": Eyes(
        *("smolvlm", _SQUARES, Case("llama", {"tie_word_embeddings": True}), _idefics3_pictures, _idefics3_inputs),
    ),
    "pixtral": Eyes(
        *("llava", _PIXTRAL, Case("mistral"), lambda: _pixtral_pictures(4), _pixtral_inputs),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Eyes(
        *("mistral3", {**_PIXTRAL, "hidden_act": "gelu"}, Case("mistral"), lambda: _pixtral_pictures(8)),
        *(_pixtral_inputs, {"vision_feature_layer": -2}),
    ),
    "llava-two-layers": Eyes(
        *("llava", _CLIP, Case("llama"), _clip_pictures, _whole_inputs),
        {"vision_feature_layer": [0, -3], "multimodal_projector_bias": False},
    ),
    "qwen3-vl-moe": Eyes(
        "qwen3_vl_moe",
        _QWEN3,
        Case("qwen3_vl_moe_text", rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)),
    ),
    "qwen3.5": Eyes("qwen3_5", _QWEN3_5, Case("qwen3_5_text", _DELTA)),
    "qwen3.5-moe": Eyes("qwen3_5_moe", _QWEN3_5, Case("qwen3_5_moe_text", {**_DELTA, "num_experts": 8})),
}
