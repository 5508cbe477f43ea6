"""The known quantization methods, by `quant_method` in quantization_config. No other code looks at that name."""

from penstock.models.formats.awq import AWQ_METHOD
from penstock.models.formats.bitsandbytes import BITSANDBYTES_METHOD
from penstock.models.formats.compressed_tensors import COMPRESSED_TENSORS_METHOD
from penstock.models.formats.format import Quantization, unsupported
from penstock.models.formats.fp8 import FP8_METHOD
from penstock.models.formats.gguf import GGUF_METHOD
from penstock.models.formats.gptq import GPTQ_METHOD
from penstock.models.formats.mxfp4 import MXFP4_METHOD
from penstock.models.parsing.json_fields import JsonFields, shown

_METHODS = {
    method.name: method
    for method in (
        AWQ_METHOD,
        BITSANDBYTES_METHOD,
        COMPRESSED_TENSORS_METHOD,
        FP8_METHOD,
        GGUF_METHOD,
        GPTQ_METHOD,
        MXFP4_METHOD,
    )
}


def quantization_of(config: JsonFields) -> Quantization | None:
    """Return the quantization that config.json describes; None if weights are not quantized.

    Raises:
        ConfigError: weights are quantized in an unsupported way.
    """
    fields = config.object("quantization_config")
    if fields is None:
        return None
    named = fields.text("quant_method")
    said_by = fields.text("said_by")
    if said_by:  # an older file beside config.json
        fields = JsonFields(f"{said_by} ({named})", config.raw("quantization_config"))
    if named not in _METHODS:
        said_by = said_by or "quantization_config in config.json"
        raise unsupported(f"{shown(named) or 'an unknown format'}, says {said_by}", ", ".join(sorted(_METHODS)))
    return _METHODS[named].parse(fields)
