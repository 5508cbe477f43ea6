"""A checkpoint with another folder's texts: what a fine-tune's tokenizer and chat template replace."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.config.options import ConfigError
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.files.source import Checkpoint, StoredTensor

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)  # fmt: skip
"""The files that are looked for."""


class WithTexts:
    """See `Checkpoint`. Whatever the folder lacks, and all that is no text, is the checkpoint's own."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._texts = HuggingFaceFolder(folder)

    @property
    def path(self) -> Path:
        """The checkpoint's."""
        return self._checkpoint.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's."""
        return self._checkpoint.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's."""
        return self._checkpoint.generation_config

    @property
    def processor_config(self) -> Mapping[str, Any]:
        """The checkpoint's."""
        return self._checkpoint.processor_config

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """The folder's, field by field before the checkpoint's."""
        return {**self._checkpoint.tokenizer_config, **self._texts.tokenizer_config}

    def tokenizer(self) -> bytes:
        """The folder's, if it has one."""
        has_one = (self._texts.path / "tokenizer.json").is_file()
        return self._texts.tokenizer() if has_one else self._checkpoint.tokenizer()

    def chat_template(self) -> str | None:
        """The folder's, if it has one."""
        own = self._texts.chat_template()
        return self._checkpoint.chat_template() if own is None else own

    def embedding_modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """The checkpoint's."""
        return self._checkpoint.embedding_modules()

    def module_tensors(self, number: int) -> dict[str, StoredTensor]:
        """The checkpoint's."""
        return self._checkpoint.module_tensors(number)

    @property
    def embedding_config(self) -> Mapping[str, Any]:
        """The checkpoint's."""
        return self._checkpoint.embedding_config

    def tensors(self) -> dict[str, StoredTensor]:
        """The checkpoint's."""
        return self._checkpoint.tensors()


def has_texts(folder: Path) -> bool:
    """Whether a folder has texts of its own."""
    return folder.is_dir() and any((folder / name).is_file() for name in FILES)


def texts_digest(folder: Path) -> str:
    """A digest of a folder's texts; equal ones mean the same.

    Raises:
        ConfigError: one of them cannot be read.
    """
    digest = blake2b(digest_size=16)
    for name in FILES if has_texts(folder) else ():
        path = folder / name
        try:
            content = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
