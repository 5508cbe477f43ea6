"""Small models whose vision tower transformers computes: their configurations, and the files of their processors."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from tests.frontend.checkpoint_folder import byte_level_tokenizer
from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.checkpoints import config_of, spread
from tests.gpu_worker.families.granite import MULTIPLIERS
from tests.gpu_worker.families.recurrent import CASES as RECURRENT
from tests.gpu_worker.families.recurrent import DELTA

_NONE: Mapping[str, Any] = MappingProxyType({})


class ForeignEyes(NamedTuple):
    """A type of transformers."""

    text: Case
    vision: Mapping[str, Any]
    image: Mapping[str, Any]  # settings of the image processor
    processor: str  # its class
    image_processor: str  # the class of its part for images
    more: Mapping[str, Any] = _NONE  # of the whole model's configuration
    settings: Mapping[str, Any] = _NONE  # of the processor
    tokens: Mapping[str, str] = MappingProxyType({"image_token": "<image>"})  # with the tokenizer's names for them
    others: tuple[str, ...] = ()  # tokens without a name
    image_token: str = "<image>"  # that the tower's outputs replace
    mark: str = "<image>"
    other_tokens: tuple[str, ...] = ()  # that they replace, too: `others` that config.json lists
    ids: Mapping[str, str] = _NONE  # fields of the whole model's configuration with the ids of these tokens
    around: tuple[str, str] = ("", "")  # what chat templates write around a mark
    kind: str = ""  # transformers' name, if several entries have the same
    least_budget: int = 0  # a step that computes a whole image
    needs_torchvision: bool = False
    has_old_names: bool = True  # whether the weights are saved under the names of the first release


_TILE: dict[str, Any] = {
    "image_size": 24, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
_SIGLIP = {**_TILE, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**_TILE, "model_type": "clip_vision_model"}
_SQUARE = {"size": {"height": 24, "width": 24}}
_CONTEXT = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_TILES = {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 3}
_INTERN: dict[str, Any] = {
    "image": _TILES,
    "image_processor": "GotOcr2ImageProcessor",
    "tokens": _CONTEXT,
    "image_token": "<IMG_CONTEXT>",
    "settings": {"image_seq_length": 9},
}
_GRID: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 4,
}  # fmt: skip
_PIXELS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
_GLM_TURNS = rope("default", partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
_GLM = {**_GRID, "image_size": 24}
_GLM_FILES: dict[str, Any] = {
    "image": {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 128, "longest_edge": 4096}},
    "processor": "Glm4vProcessor",
    "image_processor": "Glm4vImageProcessor",
    "tokens": {"image_token": "<|image|>", "video_token": "<|video|>"},
    "others": ("<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    "image_token": "<|image|>",
    "mark": "<|image|>",
    "around": ("<|begin_of_image|>", "<|end_of_image|>"),
}
_OMNI: dict[str, Any] = {
    "image": _PIXELS,
    "image_processor": "Qwen2VLImageProcessor",
    "tokens": {
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    "image_token": "<|IMAGE|>",
    "mark": "<|IMAGE|>",
    "around": ("<|vision_bos|>", "<|vision_eos|>"),
    "ids": {
        "vision_start_token_id": "<|vision_bos|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_token_id": "<|AUDIO|>",
        "video_token_id": "<|VIDEO|>",
    },
    "more": {
        "audio_config": {
            "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64,
            "num_hidden_layers": 1, "num_mel_bins": 16, "downsample_hidden_size": 8,
        }
    },
}  # fmt: skip

FOREIGN_EYES: dict[str, ForeignEyes] = {
    "aya_vision": ForeignEyes(
        Case("cohere2"),
        _SIGLIP,
        {**_TILES, "max_patches": 2},
        "AyaVisionProcessor",
        "GotOcr2ImageProcessor",
        {"downsample_factor": 2, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"patch_size": 4, "img_size": 24, "downsample_factor": 2},
        others=("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
        image_token="<|IMG_PATCH|>",
    ),
    "internvl": ForeignEyes(
        Case("qwen2"),
        {**_TILE, "image_size": [24, 24], "patch_size": [4, 4]},
        processor="InternVLProcessor",
        more={"downsample_ratio": 0.5},
        mark="<IMG_CONTEXT>",
        **_INTERN,
    ),
    "internvl-qwen3": ForeignEyes(
        Case("qwen3"),
        {**_TILE, "image_size": [24, 24], "patch_size": [4, 4]},
        processor="InternVLProcessor",
        more={"downsample_ratio": 0.5},
        mark="<IMG_CONTEXT>",
        kind="internvl",
        **_INTERN,
    ),
    "glm4v": ForeignEyes(Case("glm4v_text", {**_GLM_TURNS}), _GLM, **_GLM_FILES),
    "glm46v": ForeignEyes(
        Case("glm4v_text", {**_GLM_TURNS}),
        _GLM,
        **{**_GLM_FILES, "processor": "Glm46VProcessor", "image_processor": "Glm46VImageProcessor"},
    ),
    "glmga": ForeignEyes(
        Case("glm4v_text", {**_GLM_TURNS}),
        _GLM,
        **{**_GLM_FILES, "processor": "Glm46VProcessor", "image_processor": "GlmgaImageProcessor"},
    ),
    "glm4v_moe": ForeignEyes(Case("glm4v_moe_text", {**_GLM_TURNS, "n_routed_experts": 8}), _GLM, **_GLM_FILES),
    "glm_ocr": ForeignEyes(Case("glm_ocr_text", {**_GLM_TURNS}), _GLM, **_GLM_FILES),
    "paddleocr_vl": ForeignEyes(
        Case("paddleocr_vl_text", rope("default", mrope_section=[2, 3, 3])),
        _TILE,
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}},
        "PaddleOCRVLProcessor",
        "PaddleOCRVLImageProcessor",
        others=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        around=("<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
    "deepseek_vl_hybrid": ForeignEyes(
        Case("llama"),
        {**_SIGLIP, "image_size": 24},
        {"size": {"height": 24, "width": 24}, "high_res_size": {"height": 64, "width": 64}, "min_size": 4},
        "DeepseekVLHybridProcessor",
        "DeepseekVLHybridImageProcessor",
        {
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 4,
                "mlp_dim": 48,
                "window_size": 4,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            }
        },
        {"num_image_tokens": 36},
    ),
    "qianfan_ocr": ForeignEyes(
        Case("qwen3"),
        {**_TILE, "image_size": [24, 24], "patch_size": [4, 4]},
        processor="QianfanOCRProcessor",
        more={"downsample_ratio": 0.5},
        others=("<image>",),
        has_old_names=False,
        **_INTERN,
    ),
    "deepseek_vl": ForeignEyes(
        Case("llama"),
        _SIGLIP,
        {"size": {"height": 24, "width": 24}, "min_size": 4},
        "DeepseekVLProcessor",
        "DeepseekVLImageProcessor",
        settings={"num_image_tokens": 36},
    ),
    "exaone4_5": ForeignEyes(
        Case("exaone4"),
        {**_GRID, "num_key_value_heads": 1, "window_size": 16, "fullatt_block_indexes": [1]},
        _PIXELS,
        "Exaone4_5_Processor",
        "Qwen2VLImageProcessor",
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        image_token="<|image_pad|>",
        mark="<|image_pad|>",
    ),
    "got_ocr2": ForeignEyes(
        Case("qwen2", {"max_position_embeddings": 2048}),
        {
            **_TILE,
            "image_size": 256,
            "patch_size": 4,
            "output_channels": 16,
            "mlp_dim": 48,
            "window_size": 4,
            "global_attn_indexes": [],
        },
        {"size": {"height": 256, "width": 256}},
        "GotOcr2Processor",
        "GotOcr2ImageProcessor",
        tokens={},
        others=("<imgpad>", "<img>", "</img>"),
        image_token="<imgpad>",
        mark="<imgpad>",
    ),
    "janus": ForeignEyes(
        Case("llama"),
        {**_TILE, "projection_dim": 64, "num_image_tokens": 36},
        {"size": {"height": 24, "width": 24}, "min_size": 4},
        "JanusProcessor",
        "JanusImageProcessor",
        {
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 16,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 6,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            }
        },
        {"num_image_tokens": 36},
        {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    ),
    "lighton_ocr": ForeignEyes(
        Case("qwen3"),
        {**_TILE, "model_type": "pixtral", "image_size": 32, "head_dim": 16},
        {"size": {"longest_edge": 32}, "patch_size": 4},
        "LightOnOcrProcessor",
        "PixtralImageProcessor",
        settings={"patch_size": 4, "spatial_merge_size": 2},
        tokens={"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>"},
    ),
    "llava_next_video": ForeignEyes(
        Case("llama"),
        _CLIP,
        {
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]],
        },
        "LlavaNextVideoProcessor",
        "LlavaNextImageProcessor",
        {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "llava_onevision": ForeignEyes(
        Case("qwen2"),
        _SIGLIP,
        {**_SQUARE, "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        {"num_image_tokens": 36, "vision_feature_select_strategy": "full"},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "minicpmv4_6": ForeignEyes(
        Case(
            "qwen3_5_text",
            {**DELTA, **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)},
        ),
        {**_TILE, "insert_layer_id": 0},
        {"patch_size": 4, "scale_resolution": 24, "max_slice_nums": 2},
        "MiniCPMV4_6Processor",
        "MiniCPMV4_6ImageProcessor",
        {"insert_layer_id": 0, "image_size": 24},
        tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "image_start_token": "<is>",
            "image_end_token": "<ie>",
            "slice_start_token": "<ss>",
            "slice_end_token": "<se>",
            "image_id_start_token": "<ids>",
            "image_id_end_token": "<ide>",
        },
    ),
    "ovis2": ForeignEyes(
        Case("qwen2"),
        {**_TILE, "vocab_size": 32, "num_visual_indicator_tokens": 5, "hidden_stride": 2},
        {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 3},
        "Ovis2Processor",
        "Ovis2ImageProcessor",
        {"hidden_size": 64},
        {"image_seq_length": 9},
        others=("<IMG_ATOM>",),
        other_tokens=("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        image_token="<IMG_ATOM>",
    ),
    "video_llama_3": ForeignEyes(
        Case("qwen2"),
        _TILE,
        {"patch_size": 4, "merge_size": 2, "min_tokens": 4, "max_tokens": 64},
        "VideoLlama3Processor",
        "VideoLlama3ImageProcessor",
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "video_llava": ForeignEyes(
        Case("llama"),
        _CLIP,
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        "VideoLlavaProcessor",
        "VideoLlavaImageProcessor",
        settings={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "vipllava": ForeignEyes(
        Case("llama"),
        {**_CLIP, "num_hidden_layers": 4},
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"vision_feature_layer": [-2, -3, 1]},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "gemma4": ForeignEyes(
        Case(
            "gemma4_text",
            {
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 420,
                "num_hidden_layers": 6,
                "max_position_embeddings": 1024,
            },
        ),
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        image_token="<|image|>",
        mark="<|image|>",
    ),
    "gemma4-whole": ForeignEyes(
        Case(
            "gemma4_text",
            {
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
                "vocab_size_per_layer_input": 420,
                "num_hidden_layers": 6,
                "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"],
                "max_position_embeddings": 1024,
            },
        ),
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        image_token="<|image|>",
        mark="<|image|>",
        kind="gemma4",
        least_budget=160,
    ),
    "granite_docling": ForeignEyes(
        Case("granite_docling_text", {"tie_word_embeddings": True, "embedding_multiplier": 2.0}),
        {**_TILE, "scale_factor": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_hidden_layers": 3},
        {
            **_TILES,
            "fine_route": False,
            "dense_max_patches": 0,
            "dense_max_scale": 0.0,
            "dense_min_aspect": 0.0,
            "dense_max_aspect": 0.0,
        },
        "GraniteDoclingProcessor",
        "GraniteDoclingImageProcessor",
        settings={"image_seq_len": 9},
        others=(
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
        ),
    ),
    "nemotron_h_omni": ForeignEyes(
        Case("nemotron_h", RECURRENT["nemotron_h"].changes),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 24,
            "max_img_size": 64,
            "video_temporal_patch_size": 2,
        },
        {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 64},
        "NemotronH_Omni_Reasoning_V3Processor",
        "NemotronH_Omni_Reasoning_V3ImageProcessor",
        {"projector_hidden_size": 48, "vision_hidden_size": 32, "audio_config": None},
        tokens={"image_token": "<image>", "image_start_token": "<img>", "image_end_token": "</img>"},
        others=("<video>", "<so_embedding>"),
        needs_torchvision=True,
    ),
    "qwen2_5_omni_thinker": ForeignEyes(
        Case("qwen2_5_omni_text", rope("default", mrope_section=[2, 3, 3])),
        {**_GRID, "window_size": 16, "fullatt_block_indexes": [1]},
        processor="Qwen2_5OmniProcessor",
        **_OMNI,
    ),
    "qwen3_omni_moe_thinker": ForeignEyes(
        Case(
            "qwen3_omni_moe_text",
            {"num_experts": 8, **rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)},
        ),
        {**_GRID, "num_position_embeddings": 25, "deepstack_visual_indexes": [0]},
        processor="Qwen3OmniMoeProcessor",
        **_OMNI,
    ),
    "hyperclovax_vision_v2": ForeignEyes(
        Case("hyperclovax", {"embedding_multiplier": 2.0, "logits_scaling": 0.5, "tie_word_embeddings": True}),
        {**_GRID, "window_size": 16, "fullatt_block_indexes": [1]},
        _PIXELS,
        "HyperCLOVAXVisionV2Processor",
        "Qwen2VLImageProcessor",
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        image_token="<|image_pad|>",
        mark="<|image_pad|>",
    ),
    "llava_next-granite": ForeignEyes(
        Case("granite", {**MULTIPLIERS, "embedding_multiplier": 2.0, "tie_word_embeddings": True}),
        {**_SIGLIP, "num_hidden_layers": 3},
        {
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]],
        },
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]],
            "vision_feature_layer": [-3, -1],
            "vision_feature_select_strategy": "full",
        },
        {"patch_size": 4, "vision_feature_select_strategy": "full"},
        kind="llava_next",
    ),
    "cohere2_vision": ForeignEyes(
        Case("cohere2"),
        _SIGLIP,
        {"size": {"height": 24, "width": 24}, "max_patches": 2, "patch_size": 3},
        "Cohere2VisionProcessor",
        "Cohere2VisionImageProcessor",
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
        tokens={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "img_line_break_token": "<break>",
        },
        needs_torchvision=True,
    ),
    "kimi_k25": ForeignEyes(
        Case(
            "deepseek_v3",
            {"head_dim": 8, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        ),
        {**_TILE, "pos_emb_height": 8, "pos_emb_width": 8},
        {"patch_size": 4, "merge_size": 2, "size": {"max_height": 8, "max_width": 8}, "max_patches": 64},
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        {"projection_hidden_size": 32},
        tokens={"image_token": "<image>", "video_token": "<video>"},
        needs_torchvision=True,
        has_old_names=False,
    ),
    "lfm2_vl": ForeignEyes(
        Case("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
        {**_TILE, "model_type": "siglip2_vision_model", "num_patches": 36, "vision_use_head": False},
        {
            "encoder_patch_size": 4,
            "tile_size": 24,
            "size": {"height": 24, "width": 24},
            "min_image_tokens": 4,
            "max_image_tokens": 9,
            "max_num_patches": 36,
            "max_tiles": 4,
        },
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessor",
        {"projector_hidden_size": 48},
        others=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        needs_torchvision=True,
    ),
    "llama4": ForeignEyes(
        Case("llama4_text", seed=1),
        {
            **_TILE,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "intermediate_size": 128,
        },
        {"size": {"height": 24, "width": 24}, "max_patches": 3},
        "Llama4Processor",
        "Llama4ImageProcessor",
        settings={"patch_size": 4},
        tokens={},
        others=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        image_token="<|patch|>",
        mark="<|image|>",
        needs_torchvision=True,
    ),
    "minicpm_ocr": ForeignEyes(
        Case(
            "qwen3_5_text",
            {
                **DELTA,
                **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
            },
        ),
        {**_TILE, "insert_layer_id": 0},
        {"patch_size": 4, "scale_resolution": 24, "max_slice_nums": 2},
        "MiniCPMOcrProcessor",
        "MiniCPMOcrImageProcessor",
        {"insert_layer_id": 0},
        tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "image_start_token": "<is>",
            "image_end_token": "<ie>",
            "slice_start_token": "<ss>",
            "slice_end_token": "<se>",
            "image_id_start_token": "<ids>",
            "image_id_end_token": "<ide>",
        },
        needs_torchvision=True,
    ),
}


def tokenizer_of(eyes: ForeignEyes) -> Tokenizer:
    """A small tokenizer with the model's own tokens."""
    tokenizer = byte_level_tokenizer()
    texts = dict.fromkeys((*eyes.tokens.values(), *eyes.others, *eyes.other_tokens))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return tokenizer


def write(folder: Path, name: str) -> tuple[transformers.PreTrainedModel, int]:
    """Write a checkpoint with all that its processor reads; return transformers' model, and its image token."""
    eyes = FOREIGN_EYES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(eyes)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    files = {
        "tokenizer_config.json": {**names, "extra_special_tokens": dict(eyes.tokens)},
        "preprocessor_config.json": {"image_processor_type": eyes.image_processor, **eyes.image},
        "processor_config.json": {"processor_class": eyes.processor, **eyes.settings},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    token = tokenizer.token_to_id(eyes.image_token)
    assert token is not None
    case = eyes.text._replace(changes={**eyes.text.changes, "vocab_size": tokenizer.get_vocab_size() + 5})
    text = config_of(case)
    make = transformers.CONFIG_MAPPING[eyes.kind or name]
    ids: dict[str, Any] = {field: token for field in ("image_token_id", "image_token_index") if hasattr(make(), field)}
    if eyes.other_tokens:
        ids["vocab_size"] = case.changes["vocab_size"]
        ids["visual_indicator_token_ids"] = [tokenizer.token_to_id(text) for text in eyes.other_tokens]
    ids |= {field: tokenizer.token_to_id(text) for field, text in eyes.ids.items()}
    tied = getattr(text, "tie_word_embeddings", False)
    parts = {"text_config": text.to_dict(), "vision_config": dict(eyes.vision), "tie_word_embeddings": tied}
    config = make(**{**parts, **ids, **eyes.more})
    torch.manual_seed(case.seed + len(name))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    spread(model, case.wider)
    with torch.no_grad():
        head: Any = model.get_output_embeddings() or model.language_model.lm_head
        for each in (*eyes.tokens.values(), *eyes.others, *eyes.other_tokens):
            head.weight[tokenizer.token_to_id(each)] = 0.0  # what is generated neither is a place nor begins one
    return model, token
