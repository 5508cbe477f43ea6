"""A checkpoint in one GGUF file or its parts, which hold configuration, tokenizer and weights."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.config.cache_folder import kept
from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.files.source import StoredTensor
from penstock.models.gguf.architectures import Architecture, architecture_of, config_fields
from penstock.models.gguf.block_types import FLOATS
from penstock.models.gguf.container import Container, read_container
from penstock.models.gguf.keys import Keys
from penstock.models.gguf.tensors import transformers_tensors
from penstock.models.gguf.tokenizer import GGUFTokenizer


class GGUFCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, path: Path, file: Path) -> None:
        self.path = path
        self._file = file

    @cached_property
    def _container(self) -> Container:
        return read_container(self._file)

    @cached_property
    def _keys(self) -> Keys:
        return Keys(self._file.name, self._container.metadata, self._container.tensors)

    @property
    def _architecture(self) -> Architecture:
        return architecture_of(self._keys.architecture)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's metadata in transformers' terms, with the types of quantized matrices."""
        fields = config_fields(self._architecture, self._keys) | {"has_plain_matrices": True}
        decoder = self._decoder(fields)
        tensors = transformers_tensors(self._container.tensors, decoder, self._architecture)
        types = {name: its.dtype for name, its in tensors.items() if its.dtype not in FLOATS}
        embedding, head = f"{decoder.names.embedding}.weight", f"{decoder.names.head}.weight"
        if decoder.tied_embeddings and embedding in types:
            types[head] = types[embedding]
        return fields | {"quantization_config": {"quant_method": "gguf", "types": types}} if types else fields

    @property
    def processor_config(self) -> dict[str, Any]:
        """Empty: the image encoder is in another file, which is not read."""
        return {}

    def embedding_modules(self) -> list[tuple[str, dict[str, Any]]]:
        """The pooling_type in sentence-transformers' terms. llama.cpp's vectors have length 1."""
        kind = self._container.metadata.get(f"{self._keys.architecture}.pooling_type", 0)
        if kind in (None, 0):
            return []
        mode = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken", 4: "rank"}.get(kind, str(kind)[:16])
        return [("Pooling", {f"pooling_mode_{mode}": True}), ("Normalize", {})]

    def module_tensors(self, number: int) -> dict[str, StoredTensor]:
        """Empty: its modules have no weights."""
        return {}

    @property
    def embedding_config(self) -> dict[str, Any]:
        """Empty: a file has no prompts."""
        return {}

    @staticmethod
    def _decoder(config: dict[str, Any]) -> Decoder:
        decoder = parse_model_config(config)
        if not isinstance(decoder, Decoder):
            raise ConfigError(f"{decoder.architecture} cannot be read from a GGUF file")
        return decoder

    @cached_property
    def _tokenizer(self) -> GGUFTokenizer:
        return GGUFTokenizer(self._container.metadata, self._keys.architecture)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The tokens that end a text, and sampling defaults if the file has any."""
        return self._tokenizer.generation_config()

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """Special tokens by name."""
        return self._tokenizer.tokenizer_config()

    def tokenizer(self) -> bytes:
        """A tokenizer.json of the file's vocabulary.

        Making one takes seconds for a large vocabulary, and each process of a server needs it, so it is kept.
        """
        digest = hashlib.blake2b(self._container.header, digest_size=16)
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return kept("tokenizer", digest.hexdigest(), self._tokenizer.tokenizer_json)

    def chat_template(self) -> str | None:
        """The default template."""
        return self._tokenizer.chat_template()

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors; the dtype of a quantized one is its block type, such as "Q4_K"."""
        return transformers_tensors(self._container.tensors, self._decoder(self.config), self._architecture)
