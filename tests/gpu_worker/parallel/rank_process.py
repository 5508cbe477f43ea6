"""A rank's process. It imports no more than a worker does, so that it starts soon."""

from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.startup.start import Started, start
from penstock.ipc.messages import StepPlan, WorkerHello
from penstock.parts.experts.worker import ExpertCounts

EXPERT_TOKENS = "expert tokens"
"""Asks a rank what its experts have computed."""


class RankReport(NamedTuple):
    """What a rank says of itself."""

    hello: WorkerHello
    bytes_read: int
    weight_bytes: int  # of the model's tensors
    kv_bytes: int  # of the pool


def serve_rank(channel: Connection, number: int, num_ranks: int) -> None:
    """A rank's process: starts, and computes plans, as often as it is asked to."""
    torch.set_num_threads(1)
    started: Started | None = None
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        try:
            if isinstance(message, Config):
                if started is not None:
                    started.ranks.close()
                started = start(message, Rank(number, num_ranks))
                channel.send(report(started))
            elif isinstance(message, StepPlan):
                assert started is not None
                channel.send(started.runner.launch(message).result())
            elif message == EXPERT_TOKENS:
                assert started is not None
                (counts,) = (part for part in started.parts if isinstance(part, ExpertCounts))
                channel.send(counts.take())
        except Exception as error:
            channel.send(error)


def report(started: Started) -> RankReport:
    """What `serve_rank` answers to a configuration."""
    seen: dict[int, int] = {}

    def add(found: object, depth: int = 0) -> None:
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, tuple | list) and depth < 12:
            for part in found:
                add(part, depth + 1)

    model = started.runner._model
    if isinstance(model, DecoderModel):  # native programs keep theirs packed
        add((model.embedding, model.layers, model.final_norm, model.head))
    kv = started.runner._kv.blocks
    return RankReport(started.hello, started.bytes_read, sum(seen.values()), kv.numel() * kv.element_size())
