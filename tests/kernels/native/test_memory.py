"""The CPU's own kernels without memory: an exception in Python, and afterwards they work as before."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.kernels.native import build
from penstock.kernels.native.library import Library, NativeSampler
from penstock.kernels.sampling.sampling import SamplingNeeds, sample
from tests.faults.soak import sized
from tests.kernels.native.test_native import World, dense_config, in_chunks, weights
from tests.kernels.test_cpu_sampling import make_state

_LEFT = 8 << 20
"""Bytes of address space that a child may still take: less than each call wants."""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_LARGE_VOCAB = 6 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take no more than `_LEFT`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _LEFT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def expect_no_memory(call: Callable[[], object]) -> None:
    with little_memory(), pytest.raises(MemoryError, match="CPU kernels"):
        call()


@torch.inference_mode()
def run_forward(library: Library) -> None:
    """A step of 258 tokens, which wants some 20 MB; in pieces it gave the same bits before."""
    config = dense_config(_CONFIG)
    world = World(config, page_size=16)
    model = NativeDecoderModel(config, weights(config, torch.float32), library)
    expected = world.run(model, in_chunks(world))
    world.kv.blocks.zero_()
    batch = world.batch([(s, 0, n) for s, n in enumerate(world.lens)])
    expect_no_memory(lambda: model.forward(batch, world.kv))
    logits = model.logits(model.forward(batch, world.kv))
    assert torch.equal(logits, torch.cat(expected))


def run_draw(library: Library) -> None:
    """A row with penalties counts its tokens over the vocabulary: 24 MB, in whichever thread draws."""
    state = make_state(4)._replace(repetition_penalty=torch.full((4,), 1.5), temperature=torch.zeros(4))
    rows, positions = np.arange(4, dtype=np.int32), np.full(4, 5, dtype=np.int32)
    logits = torch.randn(4, _LARGE_VOCAB)
    changed = logits.clone()
    sampler = NativeSampler(library, state)
    expect_no_memory(lambda: sampler.draw(changed, rows, positions))
    needs = SamplingNeeds(penalties=True)
    expected: Tensor = sample(logits.clone(), torch.arange(4), torch.full((4,), 5), state, needs)
    for _ in range(3):
        assert torch.equal(sampler.draw(logits.clone(), rows, positions), expected)


@pytest.mark.parametrize("num_threads", [2, 1][: sized(1, 2)])
def test_no_memory_is_an_exception(num_threads: int) -> None:
    """In a child process, whose memory is limited."""
    try:
        path = build.build()
    except build.BuildError as error:
        pytest.skip(str(error))
    code = (
        "from tests.kernels.native.test_memory import *; "
        f"library = Library(Path({str(path)!r}), {num_threads}, worth_waking=0); "
        "run_forward(library); run_draw(library); print('as before')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "as before\n"), done.stderr[-3000:]
