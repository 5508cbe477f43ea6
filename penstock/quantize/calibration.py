"""Measures the inputs of each matrix while the float model reads a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from penstock.config.options import ConfigError
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.formats.group_rounding import Correlation
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.loading.decoder_build import read_weights
from penstock.gpu_worker.models.loading.stored import as_tensor, part_of
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import ForwardInputs, GroupInputs
from penstock.gpu_worker.state.kv_pool import KVPool, page_groups
from penstock.kernels.activation import Activation
from penstock.kernels.native.library import PackedLinear
from penstock.models.check import model_tensors
from penstock.models.described import model_config_of
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import expected_tensors
from penstock.models.files.source import Checkpoint
from penstock.models.weights.sources import LinearSource

_BLOCK = 256
"""Inputs in a block whose correlations are kept. For 1e4 inputs, all correlations would take 400 MB a matrix."""
_WINDOW = 512  # tokens that are read at once
_PAGE_SIZE = 16
_LEAST_TOKENS = 256


def measured_inputs(checkpoint: Checkpoint, text: Path, num_tokens: int) -> Mapping[str, Correlation]:
    """Read the beginning of a text file; returns the correlations by the model's names for its matrices.

    Meanwhile the whole model is in memory, in the checkpoint's dtype. Experts are not measured.

    Raises:
        ConfigError: the text cannot be read, or is too short.
    """
    config = model_config_of(checkpoint)
    assert isinstance(config, Decoder)
    windows = _windows(checkpoint, text, num_tokens)
    device = CpuDevice()
    sums: dict[str, Tensor] = {}
    with torch.inference_mode():
        reader = _reader(checkpoint, config, sums)
        model = DecoderModel(config, read_weights(config, reader))
        model.prepare(device, 1, _WINDOW)
        for ids in tqdm(windows, desc="Reading the text", unit="window", leave=False, disable=None):
            _forward(model, ids, reader.dtype)
    return {name: Correlation(its) for name, its in sums.items()}


class _Measured(NamedTuple):
    """See `Linear`. Adds its inputs to its weights' sums."""

    linear: Linear
    sums: Tensor  # as in `Correlation`

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        padded = functional.pad(x.float(), (0, -x.shape[-1] % _BLOCK))
        blocks = padded.view(len(x), -1, _BLOCK).transpose(0, 1)
        self.sums.baddbmm_(blocks.mT, blocks)
        return self.linear(x, step)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: object, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        raise NotImplementedError("torch's kernels compute what is measured")


def _reader(checkpoint: Checkpoint, config: Decoder, sums: dict[str, Tensor]) -> WeightReader:
    class Measuring(WeightReader):
        def linear(self, source: LinearSource) -> Linear:
            linear = super().linear(source)
            shape = source.weight.shapes[0]
            num_inputs = shape[-2] if source.weight.is_transposed else shape[-1]
            its = torch.zeros(-(-num_inputs // _BLOCK), _BLOCK, _BLOCK)
            sums.update(dict.fromkeys(source.weight.names, its))  # parts of one product have the same inputs
            return _Measured(linear, its)

    stored = model_tensors(checkpoint, config).stored
    is_bf16 = all(stored[name].dtype == "BF16" for name in expected_tensors(config) or {})
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return Measuring(lambda name, its: part_of(as_tensor(stored[name]), its), is_bf16, dtype, torch.device("cpu"))


def _windows(checkpoint: Checkpoint, text: Path, num_tokens: int) -> list[list[int]]:
    tokenizer: Tokenizer = Tokenizer.from_str(checkpoint.tokenizer().decode())
    try:
        ids = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False).ids[:num_tokens]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {str(text)!r}: {error}") from None
    if len(ids) < _LEAST_TOKENS:
        raise ConfigError(f"{str(text)!r} has {len(ids)} tokens; at least {_LEAST_TOKENS} are needed, better thousands")
    return [ids[i : i + _WINDOW] for i in range(0, len(ids), _WINDOW)]


def _forward(model: DecoderModel, ids: list[int], dtype: torch.dtype) -> None:
    """Compute a text alone, in consecutive pages."""
    groups, length = page_groups(model.config, _PAGE_SIZE), len(ids)
    places: list[GroupInputs] = []
    first_page = 0
    for group in groups:
        count = -(-length // group.page_size)
        slots = torch.arange(length) + first_page * group.page_size
        places.append(GroupInputs(slots, torch.arange(first_page, first_page + count, dtype=torch.int32)[None]))
        first_page += count
    kv = KVPool(groups, first_page, dtype, torch.device("cpu"))
    model.enter_row(0, length)
    inputs = ForwardInputs(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(length),
        rows=torch.zeros(1, dtype=torch.int32),
        slot_mapping=places[0].slot_mapping,
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        page_table=places[0].page_table,
        max_query_len=length,
        max_seq_len=length,
        others=tuple(places[1:]),
    )
    model.forward(inputs, kv)
