"""From a float checkpoint to a quantized one, matrix by matrix."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.config.sizes import size
from penstock.gpu_worker.formats.compressed_tensors import encode
from penstock.gpu_worker.formats.group_rounding import Correlation
from penstock.gpu_worker.formats.made import made
from penstock.gpu_worker.models.loading.stored import as_tensor
from penstock.models.check import model_tensors
from penstock.models.described import model_config_of
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.files.source import StoredTensor
from penstock.models.formats.compressed_tensors import Matrix
from penstock.models.formats.made import LEAST_WEIGHTS, Recipe
from penstock.models.quantization import products_of
from penstock.models.weights.decoder import Product
from penstock.quantize.safetensors_files import Entry, Job, write
from penstock.quantize.scheme import quantization_config

_WEIGHT_FILES = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5")
_NOT_COPIED = (*_WEIGHT_FILES, "config.json", "README.md", ".*")
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that scales may have, too."""


class Wanted(NamedTuple):
    """The requested quantization."""

    body: Recipe
    head: Recipe | None  # None: the head stays as it is
    ignored: tuple[str, ...] = ()  # modules, or patterns of their names ("*.down_proj")


class QuantizedCheckpoint:
    """A quantized checkpoint that is to be written."""

    def __init__(
        self, source: HuggingFaceFolder, wanted: Wanted, correlations: Mapping[str, Correlation] | None = None
    ) -> None:
        """Decide what is done with each tensor; none is read yet.

        Args:
            source: the checkpoint to quantize.
            wanted: how to quantize it.
            correlations: of the inputs of matrices, by the model's names for the matrices, if they were measured.

        Raises:
            ConfigError: no tensor of it can be quantized.
        """
        self._source, self._wanted = source, wanted
        self._correlations = correlations or {}
        config = model_config_of(source)
        if config.quantization is not None:
            raise ConfigError(
                f"{str(source.path)!r} is quantized already ({config.quantization.name}): name the checkpoint that it "
                "was made from"
            )
        if not isinstance(config, Decoder):
            raise ConfigError(f"{config.architecture} cannot be quantized: transformers' code computes it")
        self._decoder = config
        self._tensors = model_tensors(source, config)
        self._products = {name: its for name, its in products_of(config).items() if self._is_taken(name, its)}
        if not self._products:
            raise ConfigError(
                f"no matrix of {str(source.path)!r} can be quantized in this way: they are too small, stored "
                "transposed, ignored, or have numbers of inputs that groups do not divide"
            )
        for its in wanted.ignored:
            if not any(_matches(self._own_module(name), its) for name in products_of(config)):
                raise ConfigError(f"--ignore {its}: no matrix of {str(source.path)!r} has such a name")
        self.config = self._new_config()
        self.jobs = self._new_jobs()

    @property
    def num_matrices(self) -> int:
        """How many matrices are quantized."""
        return len(self._products)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights that will be written."""
        return sum(job.num_bytes for job in self.jobs)

    @property
    def num_source_bytes(self) -> int:
        """Bytes of all weights of the source."""
        return sum(tensor.num_bytes for tensor in self._source.tensors().values())

    def write(self, out: Path, done: Callable[[Job], None]) -> None:
        """Write the checkpoint; afterwards `out` is complete or does not exist.

        Raises:
            ConfigError: `out` exists already, or there is not enough room.
            OSError: writing failed.
        """
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{str(out)!r} exists: name a folder that does not")
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < self.num_bytes:
            raise ConfigError(f"{str(out)!r} needs {size(self.num_bytes)}, but only {size(free)} of the disk are free")
        partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            self._copy_files(partial)
            text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
            (partial / "config.json").write_text(text, encoding="utf-8")
            write(partial, self.jobs, done)
            if out.exists():
                out.rmdir()
            partial.rename(out)
        except BaseException:  # also an interrupt
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _is_taken(self, name: str, product: Product) -> bool:
        recipe = self._recipe(product)
        if recipe is None or product.is_transposed or len(product.shape) != 2:
            return False
        num_outputs, num_inputs = product.shape
        if num_outputs * num_inputs < LEAST_WEIGHTS or (recipe.format == "int4" and num_inputs % recipe.group):
            return False
        module = self._own_module(name)
        return not any(_matches(module, its) for its in self._wanted.ignored)

    def _recipe(self, product: Product) -> Recipe | None:
        return self._wanted.head if product.is_head else self._wanted.body

    @property
    def _unties(self) -> bool:
        """Whether a tied head gets a matrix of its own, because the embedding stays as it is."""
        return self._decoder.tied_embeddings and any(product.is_head for product in self._products.values())

    def _own_name(self, name: str) -> str:
        """A weight's name in the new checkpoint."""
        if self._decoder.tied_embeddings and name == f"{self._decoder.names.embedding}.weight":
            return f"{self._decoder.names.head}.weight"
        return self._tensors.own_names[name]

    def _own_module(self, name: str) -> str:
        return self._own_name(name).removesuffix(".weight")

    def _new_config(self) -> dict[str, Any]:
        """The new config.json.

        Raises:
            ConfigError: the architecture's head cannot have a matrix of its own.
        """
        wanted, names = self._wanted, self._decoder.names
        quantization = quantization_config(
            wanted.body, wanted.head if self._has_head else None, names.head, self._ignored()
        )
        config = dict(self._source.config) | {"quantization_config": quantization}
        if self._unties:
            config["tie_word_embeddings"] = False
            found = parse_model_config(config)
            if not isinstance(found, Decoder) or found.tied_embeddings:
                raise ConfigError(f"the head of {self._decoder.architecture} is its embedding, and stays as it is")
        return config

    @property
    def _has_head(self) -> bool:
        return any(product.is_head for product in self._products.values())

    def _ignored(self) -> list[str]:
        """Modules with matrices that stay floats. Readers of the list do not expect embeddings in it."""
        names = self._decoder.names
        taken = {self._own_module(name) for name in self._products}
        embeddings = {f"{its}.weight" for its in (names.embedding, names.positions, names.layer_table)}
        models = {own: name for name, own in self._tensors.own_names.items()}
        found = [
            own.removesuffix(".weight")
            for own, tensor in self._source.tensors().items()
            if own.endswith(".weight") and len(tensor.shape) == 2 and models.get(own) not in embeddings
        ]
        if self._decoder.tied_embeddings:
            found.append(names.head)
        return [module for module in found if module not in taken]

    def _new_jobs(self) -> list[Job]:
        """The jobs that make what is written, in the order of the source."""
        quantization = parse_model_config(self.config).quantization
        assert quantization is not None
        models = {own: name for name, own in self._tensors.own_names.items()}
        jobs = []
        for own, tensor in self._source.tensors().items():
            name = models.get(own, "")
            product = self._products.get(name)
            if product is None or self._own_name(name) != own:
                jobs.append(Job((Entry(own, tensor.dtype, tensor.shape),), partial(_as_stored, tensor)))
            if product is not None:
                its_own = self._own_name(name)
                format = quantization.format_of(its_own)
                recipe = self._recipe(product)
                assert isinstance(format, Matrix)
                assert recipe is not None
                jobs.append(_job(its_own, tensor, format, recipe, self._correlations.get(name)))
        return jobs

    def _copy_files(self, folder: Path) -> None:
        """Copy tokenizer, templates, sampling defaults and licences: all but the weights and their descriptions."""
        for path in sorted(self._source.path.iterdir()):
            if path.is_file() and not any(fnmatch(path.name, kind) for kind in _NOT_COPIED):
                shutil.copyfile(path, folder / path.name)


def _matches(module: str, pattern: str) -> bool:
    return module == pattern or fnmatch(module, pattern)


def _as_stored(tensor: StoredTensor) -> Sequence[memoryview]:
    return (tensor.read(),)


def _job(name: str, tensor: StoredTensor, format: Matrix, recipe: Recipe, correlation: Correlation | None) -> Job:
    """The job that makes one matrix."""
    dtype = tensor.dtype if tensor.dtype in _STORED else "F32"
    parts = format.parts(name, tensor.shape)
    entries = tuple(
        Entry(part.name, dtype if role == "scales" else part.dtypes[0], part.shape)
        for role, part in parts.items()
        if part.shape is not None
    )

    def make() -> Sequence[memoryview]:
        weight = made(as_tensor(tensor), recipe, correlation)
        stored = encode(format, weight, _STORED[dtype])
        return [_bytes(stored[role]) for role in parts]

    return Job(entries, make)


def _bytes(tensor: Tensor) -> memoryview:
    numbers: npt.NDArray[np.uint8] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return numbers.data
