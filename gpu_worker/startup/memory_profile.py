"""How much memory is left for KV pages: on a GPU this is measured by running the largest batch once."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from penstock.config import Config
from penstock.config.speculative import speculative_config
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.drafting.target import Computed
from penstock.gpu_worker.models.latent_attention import scratch_numbers
from penstock.gpu_worker.models.model import Model, draws_tokens
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, cpu_budget, page_groups
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.state.state_slots import state_slots
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
    draft: Computed | None = None,
) -> Budget:
    """What is left for the pool.

    On a device with its own memory: the allowed share, minus weights, row state and the measured peak of activations.
    `draft`: a draft model that computes batches of the same size between the model's.

    Raises:
        torch.OutOfMemoryError: if the largest batch alone does not fit.
    """
    computed = [Computed(model, page_groups(model.config, config.scheduler.page_size), kv)]
    computed += [] if draft is None else [draft]
    most = config.scheduler.max_num_batched_tokens
    measured = device.measure(partial(_run_largest_batches, config, computed, dtype, device, most))
    if measured is None:
        return Budget(cpu_budget(config, device))
    total, in_use, activations = measured  # in use: weights, the CUDA context, and other processes on this GPU
    in_graphs = 0
    if not config.worker.enforce_eager:  # graphs keep tensors of their own, as many as their largest batch needs
        parts = config, computed, dtype, device, min(most, MOST_GRAPH_TOKENS)
        of_graphs = device.measure(partial(_run_largest_batches, *parts, draws=False))
        in_graphs = 0 if of_graphs is None else of_graphs.peak
    rows = row_state_bytes(config, model.config)
    rows += (config.scheduler.max_num_seqs + 1) * model.config.state_bytes
    if draft is not None:
        rows += 4 * (longest_sequence(config, model.config) + 1) * max(its.key_dim for its in draft.model.config.kv)
    latents = max((shape.key_dim for shape in model.config.kv if not shape.value_dim), default=0)
    # The measured batch has no earlier context. A real one may need as much again.
    expanded = scratch_numbers(latents) * dtype.itemsize if latents else 0
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
    draws: bool = True,
) -> None:
    for each in computed:
        _run_largest_batch(config, each, dtype, device, num_tokens, draws)


def _run_largest_batch(
    config: Config, computed: Computed, dtype: torch.dtype, device: Device, num_tokens: int, draws: bool
) -> None:
    """Run as many rows as a step may have, all on one page; `draws`: and draw tokens for them and for their drafts."""
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
    if not draws or not draws_tokens(model.config):
        return
    speculative = speculative_config(config.worker.speculative_config)
    most_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    num_draws = min(num_rows * (1 + most_drafts), num_tokens)
    logits = model.logits(hidden[:num_draws])
    kept = logits.clone()  # log-probabilities are those of logits before they are edited
    rows, sampling = torch.arange(num_draws, device=logits.device) % num_rows, state.sampling
    for its in (sampling.temperature, sampling.top_p, sampling.repetition_penalty):
        its.fill_(0.5)
    sample(logits, rows, torch.ones_like(rows), sampling, SamplingNeeds(*[True] * len(SamplingNeeds._fields)))
    del kept
