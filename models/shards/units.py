"""How finely an MLP's inner size can be split: if its matrices are quantized, only by whole groups of inputs."""

from typing import NamedTuple

from penstock.models.description.decoder import Decoder
from penstock.models.formats.format import MatrixFormat, unit
from penstock.models.formats.made import MadeAtLoad


class Units(NamedTuple):
    """How many numbers stay together: inputs of the down matrices."""

    mlp: int
    experts: int
    shared: int


def units_of(model: Decoder, number: int) -> Units:
    """Return the units of a layer."""
    if model.quantization is None:
        return _ONES
    names = model.names
    prefix = names.layer.format(number)
    return Units(
        mlp=_unit(model, f"{prefix}{names.down}.weight"),
        experts=_unit(model, prefix + names.first_down),
        shared=_unit(model, f"{prefix}{names.shared_down}.weight"),
    )


_ONES = Units(1, 1, 1)


def _unit(model: Decoder, name: str) -> int:
    quantization = model.quantization
    if isinstance(quantization, MadeAtLoad):
        return quantization.body.group if quantization.body.format == "int4" else 1
    format = stored_format(model, name)
    return 1 if format is None else unit(format, "inputs")


def stored_format(model: Decoder, name: str) -> MatrixFormat | None:
    """Return the format of a weight by its name, as far as it is known without the checkpoint's tensors."""
    return None if model.quantization is None else model.quantization.format_of(name)
