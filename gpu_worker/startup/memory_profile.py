"""How much memory is left for KV pages: on a GPU this is measured by running the largest batch once."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from penstock.config import Config
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.latent_attention import choice_numbers, scratch_numbers
from penstock.gpu_worker.models.model import Model, has_logits
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, cpu_budget, page_groups
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.state.state_slots import state_slots
from penstock.gpu_worker.steps.ahead import AheadPart, Computed
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.input_batch import make_inputs
from penstock.gpu_worker.steps.mixed_graphs import MOST_GRAPH_TOKENS
from penstock.kernels.sampling.sampling import SamplingNeeds, sample
from penstock.models.description.model_config import ModelConfig


class Budget(NamedTuple):
    """Bytes of a device."""

    pool: int
    activations: int = 0  # the measured peak of the largest step, beside the pool


def pool_budget(
    config: Config,
    model: Model,
    dtype: torch.dtype,
    kv: KVType,
    device: Device,
    ahead: AheadPart | None = None,
) -> Budget:
    """What is left for the pool.

    On a device with its own memory: the allowed share, minus weights, row state and the measured peak of activations.
    `ahead`: what works ahead of the model, perhaps with batches of the same size between the model's.

    Raises:
        torch.OutOfMemoryError: if the largest batch alone does not fit.
    """
    computed = [Computed(model, page_groups(model.config, config.scheduler.page_size), kv)]
    ahead = ahead or AheadPart()
    computed += [] if ahead.beside is None else [ahead.beside]
    most = config.scheduler.max_num_batched_tokens
    largest = partial(_run_largest_batches, config, computed, dtype, device, most, num_draws=1 + ahead.most)
    measured = device.measure(largest)
    if measured is None:
        return Budget(cpu_budget(config, device))
    total, in_use, activations = measured  # in use: weights, the CUDA context, and other processes on this GPU
    in_graphs = 0
    if not config.worker.enforce_eager:  # graphs keep tensors of their own, as many as their largest batch needs
        parts = config, computed, dtype, device, min(most, MOST_GRAPH_TOKENS)
        of_graphs = device.measure(partial(_run_largest_batches, *parts, num_draws=0))
        in_graphs = 0 if of_graphs is None else of_graphs.peak
    rows = row_state_bytes(config, model.config)
    rows += (config.scheduler.max_num_seqs + 1) * model.config.state_bytes
    if ahead.beside is not None:
        key_dim = max(its.key_dim for its in ahead.beside.model.config.kv)
        rows += 4 * (longest_sequence(config, model.config) + 1) * key_dim
    latents = max((shape.key_dim for shape in model.config.kv if not shape.value_dim), default=0)
    # The measured batch has no earlier context. A real one may need as much again.
    expanded = scratch_numbers(latents) * dtype.itemsize if latents else 0
    expanded += 4 * choice_numbers(model.config)
    allowed = int(total * config.worker.gpu_memory_utilization)
    return Budget(allowed - in_use - activations - in_graphs - rows - expanded, activations)


def row_state_bytes(config: Config, model: ModelConfig) -> int:
    """Upper bound of token buffers, page tables and the rotary table."""
    longest = longest_sequence(config, model)
    groups = page_groups(model, config.scheduler.page_size)
    num_pages = sum(math.ceil((longest + 1) / group.page_size) for group in groups)
    rotary = max((shape.key_dim for shape in model.kv), default=0)
    return 4 * ((config.scheduler.max_num_seqs + 1) * (longest + 1 + num_pages) + (longest + 1) * rotary)


def longest_sequence(config: Config, model: ModelConfig) -> int:
    """Upper bound, in tokens."""
    return config.model.max_model_len or model.max_model_len


def _run_largest_batches(
    config: Config,
    computed: Sequence[Computed],
    dtype: torch.dtype,
    device: Device,
    num_tokens: int,
    *,
    num_draws: int,
) -> None:
    for each in computed:
        _run_largest_batch(config, each, dtype, device, num_tokens, num_draws)


def _run_largest_batch(
    config: Config, computed: Computed, dtype: torch.dtype, device: Device, num_tokens: int, num_draws: int
) -> None:
    """Run as many rows as a step may have, all on one page; `num_draws`: and draw so many tokens for each."""
    model, groups, kv = computed
    page_size = config.scheduler.page_size
    num_rows = min(config.scheduler.max_num_seqs, num_tokens)
    lens = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    lens[: num_tokens % num_rows] += 1
    state = RowState(num_rows, int(lens[0]), page_size, device)
    model.prepare(device, num_rows, int(lens[0]))
    batch = HostBatch(np.arange(num_rows, dtype=np.int32), np.zeros_like(lens), lens, np.arange(num_rows))
    inputs, _ = make_inputs(batch, state, device, page_size)
    states = state_slots(model.config, num_rows, device.torch_device)
    hidden = model.forward(inputs, KVPool(groups, 1, kv, device.torch_device, states=states))
    if not num_draws or not has_logits(model.config):
        return
    num_draws = min(num_rows * num_draws, num_tokens)
    logits = model.logits(hidden[:num_draws])
    kept = logits.clone()  # log-probabilities are those of logits before they are edited
    rows, sampling = torch.arange(num_draws, device=logits.device) % num_rows, state.sampling
    for its in (sampling.temperature, sampling.top_p, sampling.repetition_penalty):
        its.fill_(0.5)
    sample(logits, rows, torch.ones_like(rows), sampling, SamplingNeeds(*[True] * len(SamplingNeeds._fields)))
    del kept
