"""Checkpoints of small models that take images, and transformers' processors for them, without weights or torchvision.

Some processors cannot be made here: they want a video processor, and with it torchvision. Of these the methods that
make placeholders are called on objects that have just what these methods read.
"""

import base64
import importlib
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.frontend.checkpoint_folder import byte_level_tokenizer

_LISTS = (
    "{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{{{{ '{mark}' }}}}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)


_TEXT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_TEXT |= {"intermediate_size": 128, "max_position_embeddings": 2048, "head_dim": 16}


@dataclass(frozen=True)
class ImageModel:
    """One family, as small as it gets."""

    architecture: str
    module: str  # of transformers.models
    processor: str
    image_processor: str
    image: dict[str, Any]  # settings of the image processor
    tokens: tuple[str, ...]
    mark: str
    settings: dict[str, Any] = field(default_factory=dict)  # of the processor
    named: dict[str, str] = field(default_factory=dict)  # tokens that the tokenizer has names for
    config: dict[str, Any] = field(default_factory=dict)
    text_type: str = "llama"  # model_type of its text part
    around: tuple[str, str] = ("", "")  # what its template writes around a mark
    image_module: str = ""  # where the image processor is, if elsewhere

    @property
    def template(self) -> str:
        return _LISTS.format(mark=self.mark.join(self.around))

    def _tokenizer(self) -> Tokenizer:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.tokens])
        return tokenizer

    def tokenizer(self) -> Any:
        """transformers' form of it."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = self._tokenizer()
        names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, **names, **({"extra_special_tokens": self.named} if self.named else {})
        )

    def make_image_processor(self) -> Any:
        name = self.image_module or self.module
        module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        return getattr(module, f"{self.image_processor}Pil")(**self.image)

    def oracle(self) -> Any:
        """transformers' processor; of some, what makes placeholders."""
        if self.module == "pixtral":  # its processor imports one function from a file that needs torchvision
            pil = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
            sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
        module = importlib.import_module(f"transformers.models.{self.module}.processing_{self.module}")
        made = getattr(module, self.processor)
        tokenizer, image_processor = self.tokenizer(), self.make_image_processor()
        if self.processor in ("LlavaProcessor", "LlavaNextProcessor", "Gemma3Processor", "Idefics3Processor"):
            return made(image_processor=image_processor, tokenizer=tokenizer, **self.settings)
        processor = object.__new__(made)
        processor.tokenizer, processor.image_processor = tokenizer, image_processor
        vars(processor).update(self.settings)
        processor.image_token, processor.fake_image_token = self.mark, "<fake_token_around_image>"
        processor.global_image_token = "<global-img>"
        processor.image_token_id = tokenizer.convert_tokens_to_ids(self.mark)
        return processor

    def expected(self, oracle: Any, text: str, images: list[Image.Image]) -> tuple[list[int], list[Any]]:
        """What transformers makes of a text with marks and of images: token ids; each image's own pixel values."""
        arguments = dict(type(oracle).images_kwargs) if hasattr(type(oracle), "images_kwargs") else {}
        arguments.pop("return_tensors", None)
        nested = self.image_processor in ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
        texts, pixels = [], []
        for image in images:  # each for itself: other images in the request change nothing
            made, replaced = oracle._process_images([[image]] if nested else [image], **arguments)
            texts += replaced
            pixels.append(np.asarray(made["pixel_values"]))
        whole, _ = oracle.get_text_with_replacements([text], texts)
        return oracle.tokenizer(whole[0], add_special_tokens=False)["input_ids"], pixels

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self._tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": self.named}
        files = {
            "tokenizer_config.json": {"chat_template": self.template, **special},
            "preprocessor_config.json": {"image_processor_type": self.image_processor, **self.image},
            "processor_config.json": {"processor_class": self.processor, **self.settings},
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        eos = tokenizer.token_to_id("<|im_end|>")
        token = tokenizer.token_to_id(self.named.get("image_token", self.mark))
        config = {
            "architectures": [self.architecture], "model_type": self.module, "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": eos, "vision_config": {}, "image_token_id": token, **self.config,
            "text_config": {"model_type": self.text_type, "vocab_size": tokenizer.get_vocab_size(), **_TEXT},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder


_QWEN: dict[str, Any] = {
    "image_processor": "Qwen2VLImageProcessor",
    "image_module": "qwen2_vl",
    "tokens": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "mark": "<|image_pad|>",
    "around": ("<|vision_start|>", "<|vision_end|>"),
}
_IDEFICS_TOKENS = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
_IDEFICS: dict[str, Any] = {
    "image": {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
    "tokens": _IDEFICS_TOKENS,
    "mark": "<image>",
    "settings": {"image_seq_len": 4},
    "config": {"vision_config": {"image_size": 64, "patch_size": 16}, "scale_factor": 2},
}
_CLIP = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
_RESOLUTIONS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
_PIXTRAL: dict[str, Any] = {
    "module": "pixtral",
    "processor": "PixtralProcessor",
    "image_processor": "PixtralImageProcessor",
    "tokens": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "mark": "[IMG]",
}
_PIXTRAL_SETTINGS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}

MODELS = {
    "qwen2-vl": ImageModel(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2VLProcessor", **_QWEN,
        config={"vision_config": {"hidden_size": 64}}, text_type="qwen2_vl_text",
        image={"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}},
    ),
    "qwen2.5-vl": ImageModel(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2_5_VLProcessor", **_QWEN,
        config={"vision_config": {"out_hidden_size": 64}}, text_type="qwen2_5_vl_text",
        image={"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64},
    ),
    "qwen3-vl": ImageModel(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLProcessor", **_QWEN,
        config={"vision_config": {"out_hidden_size": 64}}, text_type="qwen3_vl_text",
        image={"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}},
    ),
    "qwen3.5": ImageModel(
        "Qwen3_5ForConditionalGeneration", "qwen3_vl", "Qwen3VLProcessor", **_QWEN,
        config={"vision_config": {"out_hidden_size": 64}}, text_type="qwen3_5_text",
        image={"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}},
    ),
    "llava": ImageModel(
        "LlavaForConditionalGeneration", "llava", "LlavaProcessor", "CLIPImageProcessor",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        ("<image>",), "<image>", around=("", "\\n"), image_module="clip",
        settings={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        config={"vision_config": _CLIP},
    ),
    "llava-next": ImageModel(
        "LlavaNextForConditionalGeneration", "llava_next", "LlavaNextProcessor", "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
         "image_grid_pinpoints": _RESOLUTIONS},
        ("<image>",), "<image>", around=("", "\\n"),
        settings={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        config={"vision_config": _CLIP, "image_grid_pinpoints": _RESOLUTIONS},
    ),
    "gemma3": ImageModel(
        "Gemma3ForConditionalGeneration", "gemma3", "Gemma3Processor", "Gemma3ImageProcessor",
        {"size": {"height": 56, "width": 56}},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<start_of_image>", {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"vision_config": {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 4}, text_type="gemma3_text",
    ),
    "idefics3": ImageModel(
        "Idefics3ForConditionalGeneration", "idefics3", "Idefics3Processor", "Idefics3ImageProcessor", **_IDEFICS
    ),
    "smolvlm": ImageModel(
        "SmolVLMForConditionalGeneration", "smolvlm", "SmolVLMProcessor", "SmolVLMImageProcessor", **_IDEFICS
    ),
    "pixtral": ImageModel(
        "LlavaForConditionalGeneration", **_PIXTRAL, image={"size": {"longest_edge": 128}},
        settings={**_PIXTRAL_SETTINGS, "patch_size": 16, "spatial_merge_size": 1},
        config={"vision_config": {"model_type": "pixtral", "patch_size": 16}}, text_type="mistral",
    ),
    "mistral3": ImageModel(
        "Mistral3ForConditionalGeneration", **_PIXTRAL, image={"size": {"longest_edge": 168}},
        settings={**_PIXTRAL_SETTINGS, "patch_size": 14, "spatial_merge_size": 2},
        config={"vision_config": {"model_type": "pixtral", "patch_size": 14}, "spatial_merge_size": 2},
        text_type="mistral",
    ),
}  # fmt: skip


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image that looks like nothing."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    """A file as an address."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
