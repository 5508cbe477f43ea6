"""Logits processors: what others write to change one row's logits, in a few lines and as slowly as they like."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.config.samplers import Draw

Process = Callable[[Tensor, Tensor], Tensor]
"""From a row's tokens so far, int32[n], and its logits, fp32[V], to its new logits."""

Factory = Callable[..., Process]
"""Makes a row's processor of what its request says."""


def load(places: Mapping[str, str]) -> dict[str, Factory]:
    """Import the processors, by their names.

    Raises:
        ConfigError: one cannot be imported.
    """
    found = {}
    for name, place in places.items():
        module, _, path = place.partition(":")
        try:
            made: Any = import_module(module)
            for attribute in path.split("."):
                made = getattr(made, attribute)
        except Exception as error:  # whatever the module does
            raise ConfigError(f"logits processor {name!r}: {place} cannot be imported: {error!r}") from error
        if not callable(made):
            raise ConfigError(f"logits processor {name!r}: {place} cannot be called")
        found[name] = made
    return found


class ProcessorError(Exception):
    """A processor has failed; the message is for its request's client."""


class Processor:
    """A row's logits processor, in a sampler's place."""

    def __init__(self, name: str, factory: Factory | None, arguments: str) -> None:
        """`arguments`: a JSON object. What fails here fails again at each draw."""
        self._name = name
        self._process: Process | None = None
        self._error = ""
        if factory is None:
            self._error = "the worker does not have it"
            return
        try:
            self._process = factory(**msgspec.json.decode(arguments))
        except Exception as error:
            self._error = _said(error)

    def apply(self, z: Tensor, draw: Draw) -> Tensor:
        """The new logits, fp32[V].

        Raises:
            ProcessorError: it has failed, now or when it was made.
        """
        if self._process is None:
            raise ProcessorError(f"logits processor {self._name!r}: {self._error}")
        shape = z.shape
        try:  # what it returns may be a tensor of any kind, even one without a shape
            found: Any = self._process(draw.token_ids.clone(), z)  # it may write to what it gets
            if isinstance(found, torch.Tensor) and found.shape == shape and not found.is_complex():
                return found.to(z).to_dense().view(shape)
            if isinstance(found, torch.Tensor):
                what = f"a tensor of shape {list(found.shape)} and {found.dtype}"
            else:
                what = type(found).__name__
        except Exception as error:
            raise ProcessorError(f"logits processor {self._name!r}: {_said(error)}") from error
        raise ProcessorError(
            f"logits processor {self._name!r}: it returned {what} and not a tensor of shape {list(shape)}"
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
