"""Tokens do not depend on the policy, with any batching kind and any way back after a preemption.

Any two settings meet by default, all combinations in soak.
"""

from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest

from penstock.core.scheduling.invariants import check_invariants
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import AddRequest, SamplingParams
from penstock.parts.batching.options import BatchingName
from penstock.parts.policies.scheduler.registry import POLICIES
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.kernels.pairs import every

NUM_NEW = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
PROMPTS = prompts((1, 45, 17, 64, 90), seed=1)
GIB = 2**-8  # of the host: 4 MiB
ANSWERING = tuple(name for name in POLICIES if name != "deadline-refuse")  # which does not answer all requests

Make = Callable[..., Checkpoint]


@pytest.fixture(scope="module")
def expected(checkpoint: Make) -> list[list[int]]:
    """What follows each prompt, alone; compared with `transformers`."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, **schedule(512, 16, 0, num_tokens=800))
    alone = [engine.run([prompt], GREEDY)[0][0] for prompt in PROMPTS]
    assert all(greedy_errors(model, prompt, output)[0] == [] for prompt, output in zip(PROMPTS, alone, strict=True))
    return alone


def requests() -> list[tuple[int, AddRequest]]:
    """Each prompt three times, with its number: of all tenants and priorities, with targets and without."""
    made = []
    for i, (turn, number) in enumerate(product(range(3), range(len(PROMPTS)))):
        message = AddRequest(
            f"{i}", pack_int32(PROMPTS[number]), GREEDY, 1 + (i % 4 == 3), (-i) % 3, tenant="ab"[i % 2],
            group=f"{turn}", weight=1.0 + i % 2, ttft_left=1000.0 * (i % 3 == 1),
        )  # fmt: skip
        made.append((number, message))
    return made


@pytest.mark.parametrize(
    ("policy", "batching", "preemption", "cached", "depth", "page_size"),
    every(ANSWERING, get_args(BatchingName), ("recompute", "swap", "auto"), (True, False), (1, 0, 2), (4, 16)),
)
def test_tokens_do_not_depend_on_the_policy(
    checkpoint: Make,
    expected: list[list[int]],
    policy: str,
    batching: str,
    preemption: str,
    cached: bool,
    depth: int,
    page_size: int,
) -> None:
    options = schedule(64, page_size, depth, num_tokens=90 + NUM_NEW + 40, cached=cached)
    engine = Engine(
        checkpoint("llama")[0], **options, scheduling_policy=policy, max_policy_delay=0.1, batching=batching,
        batch_wait_ms=1, preemption=preemption, host_kv_gib=GIB, queue_patience=0.0,
    )  # fmt: skip
    all_requests = requests()
    for number, request in all_requests:
        for i in range(request.n):
            engine.outputs[request.request_id, i] = []
        assert engine.add_request(request) is None
        if number % 2:
            for delta in engine.step().deltas:
                engine._take(delta)
            check_invariants(engine.scheduler)
    engine.drain()
    for number, request in all_requests:
        for i in range(request.n):
            assert engine.outputs[request.request_id, i] == expected[number], request.request_id
    check_invariants(engine.scheduler)
