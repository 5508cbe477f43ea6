"""Rotary tables: the frequencies of each scaling kind, and the cosines and sines of a step."""

import math

import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.attention import Rotation
from penstock.models.parsing.rope import RopeConfig


def inverse_frequencies(config: RopeConfig, length: int = 0) -> Tensor:
    """fp32 [dim / 2]: radians per position of each rotated pair.

    Args:
        config: the rotary settings.
        length: of the sequence, for the kinds that depend on it; it has no effect up to the trained length.
    """
    theta, dim = config.theta, config.dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / (config.spread_over or dim)
    if config.kind == "dynamic":
        # Dynamic NTK (bloc97 and emozilla, 2023): stretch the base as the sequence outgrows the trained length.
        stretch = config.factor * max(length, config.original_max_len) / config.original_max_len - (config.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    frequencies = 1.0 / (theta**exponents)
    match config.kind:
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(theta**exponents, config)
        case "longrope":
            factors = config.long_factors if length > config.original_max_len else config.short_factors
            return 1.0 / (torch.tensor(factors) * theta**exponents)
        case _:
            return frequencies


def cos_sin_table(config: RopeConfig, num_positions: int) -> Tensor:
    """fp32 [num_positions, dim]: cosines in the first half of a row, sines in the second."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(config)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(config.attention_factor)


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: slow pairs are stretched, fast pairs are kept, and pairs in between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > config.original_max_len / config.low_freq_factor
    fast = wavelengths < config.original_max_len / config.high_freq_factor
    smooth = (config.original_max_len / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    return torch.where(slow, frequencies / config.factor, torch.where(fast, frequencies, between))


def _yarn(periods: Tensor, config: RopeConfig) -> Tensor:
    """YaRN (Peng et al., 2023): a ramp over the pairs from extrapolation to interpolation."""

    def pair_with(num_rotations: float) -> float:
        ratio = config.original_max_len / (num_rotations * 2 * math.pi)
        return config.dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


class Rope:
    """The rotation of a step's tokens.

    Most kinds share one table over positions. In some kinds the rotation depends on a sequence's length. Then the
    prompt's length counts, which is fixed when the sequence enters a row, so that tokens do not depend on how the
    prompt was split into chunks. Prompts within the trained length are rotated as in training. If no sequence can be
    longer, all share one table.
    """

    def __init__(self, config: RopeConfig) -> None:
        self._config = config
        self.table: Tensor | None = None  # fp32[positions, dim], as `cos_sin_table` makes it; None if rows differ

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        """Allocate the table, or room for each row's own frequencies."""
        if self._config.depends_on_length and max_model_len > self._config.original_max_len:
            base = inverse_frequencies(self._config)
            self._device = device
            self._row_frequencies = base.repeat(num_rows, 1).to(device.torch_device)  # fp32[R, dim / 2]
        else:
            self.table = cos_sin_table(self._config, max_model_len + 1).to(device.torch_device)
        if self._config.sections:
            sections = torch.tensor(self._config.section_of_pair * 2)
            self._sections = sections.to(device.torch_device)  # int64[dim], which of three turns each number is of

    def set_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row: set the row's own frequencies, for the kinds without a table."""
        frequencies = inverse_frequencies(self._config, num_prompt_tokens)
        self._row_frequencies[row] = self._device.upload(frequencies.numpy())

    def for_step(
        self, positions: Tensor, rows: Tensor, query_start_loc: Tensor, turns: Tensor | None = None
    ) -> Rotation:
        """The angles of a step.

        On a GPU the kernel reads the shared table by position. On a CPU the table's rows are gathered once for all
        layers.

        Args:
            positions: int64[T].
            rows: int32[N], the row of each batch row.
            query_start_loc: int32[N + 1], where each batch row's tokens begin.
            turns: int64[3, T], as in `ImageInputs`.
        """
        if self.table is None:
            num_new = query_start_loc.diff().long()
            row_of_token = rows.long().repeat_interleave(num_new, output_size=positions.shape[0])
            angles = positions.float()[:, None] * self._row_frequencies[row_of_token]
            return Rotation(None, torch.cat((angles.cos(), angles.sin()), dim=1).mul_(self._config.attention_factor))
        if turns is not None and self._config.sections:
            return Rotation(None, self.table.gather(0, turns.index_select(0, self._sections).T))
        if positions.is_cuda:
            return Rotation(positions, self.table)
        return Rotation(None, self.table.index_select(0, positions))
