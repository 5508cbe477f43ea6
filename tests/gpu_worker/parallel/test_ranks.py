"""Ranks exchange tensors as their interface says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from penstock.config import Config, ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.ranks import Place
from penstock.gpu_worker.parallel.alone import Alone
from penstock.gpu_worker.parallel.distributed import meet
from penstock.gpu_worker.parallel.one_host import OneHost, in_shared_memory, program_ranks
from penstock.gpu_worker.parallel.open import open_ranks
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.native.ranks.group import DistantRanks
from tests.kernels.native.native_library import load_library


def _of(ranks: Ranks, shape: tuple[int, ...]) -> Tensor:
    """Numbers that each rank knows of all."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(ranks.place.number))


def _exchange(number: int, folder: str, num_tensor: int, num_stages: int, shares_memory: bool) -> None:
    place = Place(number % num_tensor, num_tensor, number // num_tensor, num_stages)
    ranks: Ranks = meet(f"file://{folder}/ranks", place, torch.device("cpu"))
    if shares_memory:
        ranks = in_shared_memory(ranks, load_library(1))
        assert isinstance(ranks, OneHost)
        transposed = torch.arange(6.0).view(2, 3).T
        assert ranks.all_reduce(transposed).tolist() == (num_tensor * torch.arange(6.0).view(2, 3).T).tolist()
    peers = [torch.Generator().manual_seed(place._replace(tensor=i).number) for i in range(num_tensor)]
    of_all = torch.stack([torch.randn((3, 5), generator=peer) for peer in peers])
    own = _of(ranks, (3, 5))
    assert torch.equal(ranks.all_gather(own), torch.cat(tuple(of_all), dim=-1))
    reduced = ranks.all_reduce(own.clone())
    torch.testing.assert_close(reduced, of_all.sum(0))
    assert len({tuple(row.tolist()) for row in ranks.all_gather(reduced).view(3, num_tensor, 5)[0]}) == 1, "same bits"
    sent = [place.tensor + i for i in range(num_tensor)]
    rows = torch.tensor([[place.tensor, to] for to in range(num_tensor) for _ in range(sent[to])]).view(-1, 2)
    got = ranks.all_to_all(rows, sent, sent)
    assert got.tolist() == [[other, place.tensor] for other in range(num_tensor) for _ in range(sent[other])]
    if place.stage + 1 < num_stages:
        ranks.send(own, place.stage + 1)
    if place.stage:
        before = torch.Generator().manual_seed(place._replace(stage=place.stage - 1).number)
        assert torch.equal(ranks.receive(torch.empty(3, 5), place.stage - 1), torch.randn((3, 5), generator=before))
    ranks.close()
    ranks.close()


@pytest.mark.parametrize(("num_tensor", "num_stages", "shares_memory"), [(2, 1, False), (2, 2, False), (2, 2, True)])
def test_ranks_exchange_tensors(tmp_path: Path, num_tensor: int, num_stages: int, shares_memory: bool) -> None:
    if shares_memory:
        load_library(1)  # compile once, or skip
    run: Callable[..., object] = start_processes
    arguments = (str(tmp_path), num_tensor, num_stages, shares_memory)
    run(_exchange, arguments, num_tensor * num_stages, start_method="forkserver")


class _Far(Alone):
    """Two ranks, of which the other one, on another host, says the same."""

    place = Place(tensor=1, num_tensor=2)

    def all_gather(self, x: Tensor) -> Tensor:
        first = x if len(x) == 1 else torch.frombuffer(bytearray(_ELSEWHERE.ljust(len(x))), dtype=torch.uint8)
        return torch.cat((first, x), dim=-1)


_ELSEWHERE = b"4194305:3:4096:00000000000000000000000000000000"


def test_ranks_of_several_hosts_go_on_over_the_network() -> None:
    far, library = _Far(), load_library(1)
    assert in_shared_memory(far, library) is far
    assert isinstance(program_ranks(far, library), DistantRanks)
    assert program_ranks(Alone(), library) is None


def test_places() -> None:
    options = ParallelOptions(tensor_parallel_size=2, pipeline_parallel_size=3)
    places = [Place.of(number, options) for number in range(options.num_ranks)]
    assert [place.number for place in places] == list(range(6))
    assert [place.answers for place in places] == [False] * 4 + [True, False]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert Place().is_alone
    assert Place().answers


def test_one_rank_meets_nobody() -> None:
    ranks = open_ranks(Config(), 0, torch.device("cpu"))
    x = torch.ones(2, 3)
    assert ranks.all_reduce(x) is ranks.all_gather(x) is x
    with pytest.raises(ValueError, match="stage 1"):
        ranks.send(x, 1)


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        meet("ipc://somewhere", Place(num_tensor=2), torch.device("cpu"))


_STUCK = """
import atexit, threading
import torch, torch.distributed
from penstock.config.ranks import Place
from penstock.gpu_worker.__main__ import _end_at_once
from penstock.gpu_worker.parallel import distributed

ranks = distributed.meet("file://{folder}/ranks", Place(), torch.device("cpu"))
assert ranks.all_reduce(torch.ones(2)).tolist() == [1, 1]
torch.distributed.destroy_process_group = threading.Event().wait
atexit.register(threading.Event().wait)  # as a library would that waits for its stuck thread
distributed.LEAVING_SECONDS = 0.1
assert not ranks.close()
assert not ranks.close()
_end_at_once(3)
"""


def test_a_rank_that_others_hold_back_ends_all_the_same(tmp_path: Path) -> None:
    """NCCL may wait for ranks that are gone when a group is left."""
    command = [sys.executable, "-c", _STUCK.format(folder=tmp_path)]
    ended = subprocess.run(command, timeout=90, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr


def test_a_group_that_is_broken_can_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = meet(f"file://{tmp_path}/ranks", Place(), torch.device("cpu"))
    leave = torch.distributed.destroy_process_group

    def broken() -> None:
        leave()
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(torch.distributed, "destroy_process_group", broken)
    assert ranks.close()
