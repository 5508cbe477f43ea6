"""GPTQ, as AutoGPTQ and GPTQModel write it: integer codes of groups of inputs, packed along the inputs."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from penstock.config.options import ConfigError
from penstock.models.formats.format import (
    FLOATS,
    INPUTS,
    OUTPUTS,
    Part,
    QuantizationMethod,
    Shape,
    unsupported,
)
from penstock.models.formats.modules import along_groups, along_words, num_groups, num_words, pattern, stem_of
from penstock.models.parsing.json_fields import JsonFields

SUPPORTED = "GPTQ of 2, 3, 4 or 8 bits in the layouts gptq and gptq_v2"
_LAYOUTS = {"": 1, "gptq": 1, "gptq_v2": 2}  # layout -> version of its zero points
_BITS = (2, 3, 4, 8)


class GPTQMatrix(NamedTuple):
    """See `MatrixFormat`; what the tensors hold is in `gpu_worker/formats/gptq.py`."""

    bits: int
    group_size: int | None  # inputs that share a scale; None: all
    version: int  # 1: zero points are stored minus one
    has_order: bool  # whether groups were made in the order of the inputs' importance

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        num_outputs, num_inputs = shape
        stem, groups = stem_of(name), num_groups(num_inputs, self.group_size)
        is_padded = num_inputs * self.bits % 32 > 0  # then only g_idx shows the number of inputs
        codes, zeros = (num_words(num_inputs, self.bits), num_outputs), (groups, num_words(num_outputs, self.bits))
        of_groups, is_optional = along_groups("inputs", self.group_size), not (self.has_order or is_padded)
        return {
            "codes": Part(f"{stem}.qweight", codes, ("I32",), axes=(along_words("inputs", self.bits), OUTPUTS)),
            "zeros": Part(f"{stem}.qzeros", zeros, ("I32",), axes=(of_groups, along_words("outputs", self.bits))),
            "scales": Part(f"{stem}.scales", (groups, num_outputs), FLOATS, axes=(of_groups, OUTPUTS)),
            "groups": Part(f"{stem}.g_idx", (num_inputs,), ("I32",), is_optional=is_optional, axes=(INPUTS,)),
        }


class GPTQ(NamedTuple):
    """See `Quantization`."""

    usual: GPTQMatrix
    exceptions: tuple[tuple[re.Pattern[str], GPTQMatrix | None], ...]  # the first match of a module's name counts
    has_head: bool

    @property
    def name(self) -> str:
        return f"GPTQ, {self.usual.bits} bits"

    def format_of(self, name: str) -> GPTQMatrix | None:
        stem = stem_of(name)
        if not self.has_head and stem.endswith("lm_head"):
            return None
        return next((its for found, its in self.exceptions if found.match(stem)), self.usual)

    def ignores(self, name: str) -> bool:
        # AutoGPTQ writes a bias of zeros for every matrix.
        return name.endswith((".bias", ".g_idx"))


def parse(fields: JsonFields) -> GPTQ:
    """As `Parse`."""
    if fields.flag("is_marlin_format"):
        raise unsupported("GPTQ in the layout marlin", SUPPORTED)
    layout = (fields.text("checkpoint_format") or fields.text("format")).lower()
    if layout not in _LAYOUTS:
        raise unsupported(f"GPTQ in the layout {layout}", SUPPORTED)
    if (words := fields.text("pack_dtype", "int32").removeprefix("torch.")) != "int32":
        raise unsupported(f"GPTQ packed in words of {words}", SUPPORTED)
    usual = _matrix(fields, GPTQMatrix(0, 128, _LAYOUTS[layout], False))
    return GPTQ(usual, tuple(_exceptions(fields, usual)), fields.flag("lm_head"))


def _matrix(fields: JsonFields, default: GPTQMatrix) -> GPTQMatrix:
    bits = fields.whole("bits", default.bits or None)
    if bits not in _BITS:
        raise unsupported(f"GPTQ of {bits} bits", SUPPORTED)
    size = fields.whole("group_size", default.group_size or -1, least=-1)
    if size == 0:
        raise ConfigError("quantization_config: group_size must be -1 or a positive integer, got 0")
    has_order = fields.flag("desc_act", default.has_order)
    return default._replace(bits=bits, group_size=None if size == -1 else size, has_order=has_order)


def _exceptions(fields: JsonFields, usual: GPTQMatrix) -> list[tuple[re.Pattern[str], GPTQMatrix | None]]:
    """Return GPTQModel's exceptions: regular expressions, with "-:" in front for modules that are not quantized."""
    dynamic = fields.object("dynamic")
    found: list[tuple[re.Pattern[str], GPTQMatrix | None]] = []
    for key in [] if dynamic is None else dynamic.names():
        assert dynamic is not None
        if key.startswith("-:"):
            found.append((pattern(key.removeprefix("-:")), None))
        else:
            its = dynamic.object(key)
            found.append((pattern(key.removeprefix("+:")), usual if its is None else _matrix(its, usual)))
    return found


GPTQ_METHOD = QuantizationMethod("gptq", parse)
