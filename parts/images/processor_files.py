"""What a checkpoint's files say about its image processor, wherever they say it."""

from collections.abc import Mapping
from typing import Any

from penstock.config import ConfigError
from penstock.models.files.source import Checkpoint


class ProcessorFiles:
    """The files' settings, and the questions that are asked about them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tokens = checkpoint.tokenizer_config
        self.processor = checkpoint.processor_config
        has_own_file = (checkpoint.path / "preprocessor_config.json").is_file()
        self.image_file = "preprocessor_config.json" if has_own_file else "processor_config.json"
        image = self.processor.get("image_processor")
        self.image: Mapping[str, Any] = image if isinstance(image, dict) else {}

    @property
    def vision(self) -> Mapping[str, Any]:
        found = self.config.get("vision_config")
        return found if isinstance(found, dict) else {}

    def token(self, name: str, usual: str) -> str:
        """A token's text, from whichever file has it."""
        extra = self.tokens.get("extra_special_tokens")
        named = extra if isinstance(extra, dict) else {}
        for found in (named.get(name), self.tokens.get(name), self.processor.get(name)):
            if isinstance(found, dict):
                found = found.get("content")
            if isinstance(found, str) and found:
                return found
        return usual

    def number(self, name: str, usual: Any) -> int:
        """A number in the processor's file; `usual` if it has none."""
        found = self.processor.get(name)
        found = usual if found is None else found
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ConfigError(f"processor_config.json: {name} must be a number, got {str(found)[:64]}")
        return found

    def patch_size(self) -> int:
        return self.number("patch_size", self.vision.get("patch_size"))

    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """Sizes (rows, columns) in pixels of pictures that are cut into tiles."""
        found = self.image.get("image_grid_pinpoints") or self.config.get("image_grid_pinpoints") or []
        try:
            return tuple((int(rows), int(columns)) for rows, columns in found)
        except (TypeError, ValueError):
            raise ConfigError(f"image_grid_pinpoints must be pairs of sizes, got {str(found)[:64]}") from None

    def leaves_out_class(self) -> bool:
        """Whether the first of the tower's outputs is left out."""
        said = self.processor.get("vision_feature_select_strategy") or self.config.get("vision_feature_select_strategy")
        return (said or "default") == "default"

    def merged_patches(self) -> int:
        """Pixtral: patches on each side of the square that becomes one token."""
        return self.number("spatial_merge_size", self.config.get("spatial_merge_size") or 1)

    def num_more_tokens(self) -> int:
        """LLaVA: tokens of a tile in addition to those of its patches."""
        return self.number("num_additional_image_tokens", 0)

    def tokens_of_tile(self) -> int:
        """Idefics3: tokens of a tile."""
        return self.number("image_seq_len", 169)

    def tokens_of_gemma(self) -> int:
        """Gemma 3: tokens of a picture."""
        return self.number("image_seq_length", self.config.get("mm_tokens_per_image") or 256)

    def image_class(self, usual: str) -> str:
        """The name of the class that computes pixel values."""
        return str(self.image.get("image_processor_type") or usual).removesuffix("Fast").removesuffix("Pil")
