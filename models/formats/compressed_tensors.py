"""compressed-tensors, as llm-compressor writes it: integers and FP8, alone or packed; several kinds in one checkpoint.

Each group of modules has a scheme. A module belongs to the first group that has its name, else to one with a matching
regular expression ("re:..."), else to one with its class. The list of ignored modules comes before all groups.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.config.options import ConfigError
from penstock.models.formats.format import (
    FLOATS,
    INPUTS,
    OUTPUTS,
    Along,
    Inputs,
    Part,
    QuantizationMethod,
    Shape,
    unsupported,
)
from penstock.models.formats.modules import along_groups, along_words, num_groups, num_words, pattern, stem_of
from penstock.models.parsing.json_fields import JsonFields, shown

SUPPORTED = (
    "compressed-tensors in the formats pack-quantized, int-quantized, naive-quantized and float-quantized, "
    "of integers of 2 to 6 or 8 bits, or FP8 (e4m3)"
)
_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_ALONE = (_INTEGERS, _FLOATS, "naive-quantized")
_MIXED = ("mixed-precision", "dense", "fakequant", "")  # top-level values that leave the format to each group
_BITS = (2, 3, 4, 5, 6, 8)
_CLASSES = ("Linear", "ColumnParallelLinear", "RowParallelLinear")


class Scales(NamedTuple):
    """Which elements share a scale."""

    rows: int | None  # None: all outputs
    columns: int | None  # None: all inputs

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of a matrix's scales."""
        if self.rows is None:
            return (1,)
        return num_groups(shape[0], self.rows), num_groups(shape[1], self.columns)

    @property
    def axes(self) -> tuple[Along | None, ...]:
        """Return `Part.axes` of the scales."""
        if self.rows is None:
            return (None,)
        return along_groups("outputs", self.rows), along_groups("inputs", self.columns)


class Packed(NamedTuple):
    """Integers packed along the inputs; see `MatrixFormat`."""

    bits: int
    scales: Scales
    is_symmetric: bool
    has_order: bool  # whether inputs are reordered into groups
    inputs: Inputs | None

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        stem, scales = stem_of(name), self.scales.shape(shape)
        words = num_words(shape[1], self.bits)
        of_words = along_words("inputs", self.bits)
        parts = {
            "codes": Part(f"{stem}.weight_packed", (shape[0], words), ("I32",), axes=(OUTPUTS, of_words)),
            "shape": Part(f"{stem}.weight_shape", (2,), ("I64", "I32"), is_optional=words * 32 == shape[1] * self.bits),
            "scales": Part(f"{stem}.weight_scale", scales, FLOATS, axes=self.scales.axes),
        }
        if not self.is_symmetric:
            packed = (num_words(scales[0], self.bits), *scales[1:])
            rows = None if self.scales.rows is None else along_words("outputs", self.bits)
            if rows is not None and self.scales.rows is not None:
                rows = rows._replace(num=rows.num * self.scales.rows)
            axes = (rows, *self.scales.axes[1:])
            parts["zeros"] = Part(f"{stem}.weight_zero_point", packed, ("I32",), axes=axes)
        if self.has_order:
            parts["groups"] = Part(f"{stem}.weight_g_idx", shape[1:], ("I32",), axes=(INPUTS,))
        return parts | _input_scale(stem, self.inputs)


class Integers(NamedTuple):
    """Integers in a byte each; see `MatrixFormat`."""

    bits: int
    scales: Scales
    is_symmetric: bool
    inputs: Inputs | None

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        stem, scales = stem_of(name), self.scales.shape(shape)
        parts = {
            "codes": Part(name, shape, ("I8",), axes=(OUTPUTS, INPUTS)),
            "scales": Part(f"{stem}.weight_scale", scales, FLOATS, axes=self.scales.axes),
        }
        if not self.is_symmetric:
            parts["zeros"] = Part(f"{stem}.weight_zero_point", scales, ("I8",), axes=self.scales.axes)
        return parts | _input_scale(stem, self.inputs)


class Floats(NamedTuple):
    """FP8; see `MatrixFormat`."""

    scales: Scales
    inputs: Inputs | None

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        stem = stem_of(name)
        return {
            "codes": Part(name, shape, ("F8_E4M3",), axes=(OUTPUTS, INPUTS)),
            "scales": Part(f"{stem}.weight_scale", self.scales.shape(shape), FLOATS, axes=self.scales.axes),
            **_input_scale(stem, self.inputs),
        }


Matrix = Packed | Integers | Floats


def _input_scale(stem: str, inputs: Inputs | None) -> dict[str, Part]:
    is_static = inputs is not None and inputs.is_static
    return {"input_scale": Part(f"{stem}.input_scale", (), FLOATS)} if is_static else {}


class _Rule:
    """Matches modules by name, regular expression or class."""

    def __init__(self, targets: Iterable[str]) -> None:
        targets = tuple(targets)
        self._names = frozenset(its for its in targets if not its.startswith("re:"))
        self._patterns = [pattern(its.removeprefix("re:")) for its in targets if its.startswith("re:")]
        self.all_linear = not self._names.isdisjoint(_CLASSES)

    def names(self, stem: str) -> bool:
        return stem in self._names

    def describes(self, stem: str) -> bool:
        return any(found.match(stem) for found in self._patterns)


class CompressedTensors:
    """See `Quantization`."""

    def __init__(self, name: str, groups: list[tuple[_Rule, Matrix | None]], ignored: _Rule) -> None:
        self.name = name
        self._groups, self._ignored = groups, ignored

    def format_of(self, name: str) -> Matrix | None:
        stem = stem_of(name)
        if self._ignored.names(stem) or self._ignored.describes(stem) or self._ignored.all_linear:
            return None
        for tell in (_Rule.names, _Rule.describes, lambda rule, _: rule.all_linear):
            for rule, matrix in self._groups:
                if tell(rule, stem):
                    return matrix
        return None

    def ignores(self, name: str) -> bool:
        return bool(_REDUNDANT.search(name))


_REDUNDANT = re.compile(
    r"\.((weight|input|output)_zero_point|weight_shape|input_scale|output_scale|[qkv]_(scale|zero_point))$"
)
"""Ignored tensors: zero points that are all 0, scales of dynamically rounded inputs, and scales of KV."""


def parse(fields: JsonFields) -> CompressedTensors:
    """As `Parse`."""
    sparsity, transforms = fields.object("sparsity_config"), fields.object("transform_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise unsupported(f"compressed-tensors, sparse ({shown(sparsity.text('format'))})", SUPPORTED)
    if transforms is not None and transforms.object("config_groups") is not None:
        raise unsupported("compressed-tensors with transforms of inputs (transform_config)", SUPPORTED)
    status = fields.text("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise unsupported(f"compressed-tensors with the status {status}", SUPPORTED)
    layout = fields.text("format")
    if layout not in (_PACKED, *_ALONE, *_MIXED):
        raise unsupported(f"compressed-tensors in the format {layout}", SUPPORTED)
    listed = fields.object("config_groups")
    groups: list[tuple[_Rule, Matrix | None]] = []
    kinds: dict[str, None] = {}
    for key in [] if listed is None else listed.names():
        assert listed is not None
        its = listed.object(key)
        if its is None:
            raise unsupported(f"compressed-tensors with a group {shown(key)} that names no scheme", SUPPORTED)
        matrix = _matrix(its, layout)
        groups.append((_Rule(its.texts("targets") or ()), matrix))
        if matrix is not None:
            kinds[_title(matrix)] = None
    if not kinds and fields.raw("kv_cache_scheme") is None:
        raise unsupported("compressed-tensors without quantized weights", SUPPORTED)
    return CompressedTensors(
        f"compressed-tensors {', '.join(kinds) or 'KV'}", groups, _Rule(fields.texts("ignore") or ())
    )


def _title(matrix: Matrix) -> str:
    """Return a short name, such as W4A16."""
    bits = 8 if isinstance(matrix, Floats) else matrix.bits
    return f"{'FP8 ' * isinstance(matrix, Floats)}W{bits}A{16 if matrix.inputs is None else 8}"


def _matrix(scheme: JsonFields, layout: str) -> Matrix | None:
    weights = scheme.object("weights")
    if weights is None:
        return None
    layout = scheme.text("format") or layout
    kind, bits = weights.text("type", "int").lower(), weights.whole("num_bits", 8)
    inputs = _inputs(scheme.object("input_activations"))
    if (ended := scheme.object("output_activations")) is not None and ended.names():
        raise unsupported("compressed-tensors with quantized outputs", SUPPORTED)
    scales, is_symmetric = _scales(weights), weights.flag("symmetric", True)
    if layout in _MIXED:
        layout = _FLOATS if kind == "float" else _PACKED if inputs is None else _INTEGERS
    if layout not in (_PACKED, *_ALONE):
        raise unsupported(f"compressed-tensors in the format {layout}", SUPPORTED)
    if kind == "float":
        if bits != 8 or layout == _PACKED or not is_symmetric:
            raise unsupported(f"compressed-tensors with floats of {bits} bits, {layout}", SUPPORTED)
        return Floats(scales, inputs)
    if kind != "int" or bits not in _BITS or layout == _FLOATS:
        raise unsupported(f"compressed-tensors with {kind} of {bits} bits, {layout}", SUPPORTED)
    if layout == _PACKED:
        has_order = str(weights.raw("actorder")).lower() in ("group", "dynamic", "true")
        if not is_symmetric and scales.rows is None:
            raise unsupported("compressed-tensors, packed, with one zero point of a matrix", SUPPORTED)
        return Packed(bits, scales, is_symmetric, has_order, inputs)
    return Integers(bits, scales, is_symmetric, inputs)


def _scales(args: JsonFields) -> Scales:
    strategy, size = args.text("strategy").lower(), args.whole("group_size", -1, least=-1)
    if not strategy:
        strategy = "group" if size > 0 else "channel" if args.raw("group_size") == -1 else "tensor"
    if strategy == "tensor":
        return Scales(None, None)
    if strategy == "channel":
        return Scales(1, None)
    if strategy == "group" and size > 0:
        return Scales(1, size)
    if strategy == "block":
        block = _block(args.raw("block_structure"))
        return Scales(*block)
    raise unsupported(f"compressed-tensors with scales for each {shown(strategy)} of weights", SUPPORTED)


def _block(found: Any) -> tuple[int, int]:
    """Return rows and columns, given as a list or as "128x128"."""
    sizes = found.split("x") if isinstance(found, str) else found
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        rows, columns = 0, 0
    if rows < 1 or columns < 1:
        raise ConfigError(
            f"quantization_config: block_structure must be two positive integers, got {shown(repr(found))}"
        )
    return rows, columns


def _inputs(args: JsonFields | None) -> Inputs | None:
    """Return how inputs are rounded; None if they are not."""
    if args is None:
        return None
    kind, bits = args.text("type", "int").lower(), args.whole("num_bits", 8)
    if bits == 16:
        return None
    if bits != 8 or kind not in ("int", "float"):
        raise unsupported(f"compressed-tensors with inputs in {kind} of {bits} bits", SUPPORTED)
    if not args.flag("symmetric", True):
        raise unsupported("compressed-tensors with inputs rounded around a zero point", SUPPORTED)
    is_static = args.raw("dynamic") in (False, None)
    strategy, size = args.text("strategy").lower(), args.whole("group_size", -1, least=-1)
    if is_static and strategy not in ("tensor", ""):
        raise unsupported(f"compressed-tensors with a static scale for each {shown(strategy)} of inputs", SUPPORTED)
    if not is_static and strategy not in ("token", "group", "tensor"):
        raise unsupported(f"compressed-tensors with a scale for each {shown(strategy)} of inputs", SUPPORTED)
    return Inputs("int8" if kind == "int" else "fp8_e4m3", is_static, size if size > 0 else None)


COMPRESSED_TENSORS_METHOD = QuantizationMethod("compressed-tensors", parse)
