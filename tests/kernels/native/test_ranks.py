"""Ranks that exchange numbers in memory that they share: real processes, every rank's bits."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.native.program.program import Program
from penstock.kernels.native.ranks.group import DistantRanks, SharedRanks
from penstock.kernels.native.ranks.memory import MAX_RANKS, NotHereError, RankMemory
from tests.faults.soak import sized
from tests.kernels.native.native_library import load_library
from tests.kernels.native.rank_processes import RankProcesses, run_ranks


def part(rank: int, number: int, *shape: int) -> Tensor:
    """What a rank gives; of very unlike sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 4, shape, generator=generator)


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total


SIZES = [1, 15, 16, 896, 4095, 4096, 4097, 70_000, 300_001]


def add_up(ranks: SharedRanks, _: Library, sizes: list[int]) -> list[Tensor]:
    made = []
    for number, size in enumerate(sizes):
        x = part(ranks.struct.rank, number, size)
        ranks.all_reduce(x)
        made.append(x)
    return made


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (8, 1)])
def test_sums_are_added_in_the_order_of_ranks_with_the_same_bits_everywhere(num_ranks: int, num_threads: int) -> None:
    results = run_ranks(num_ranks, add_up, SIZES, num_threads=num_threads)
    for number, size in enumerate(SIZES):
        expected = in_order([part(rank, number, size) for rank in range(num_ranks)])
        for rank in range(num_ranks):
            assert torch.equal(results[rank][number], expected), (size, rank)


def many(ranks: SharedRanks, _: Library, count: int) -> int:
    """Small and larger arrays by turns, without a pause; a rank is late now and then."""
    number_of_wrong = 0
    for i in range(count):
        size = (7, 896, 20_000)[i % 3] if i % 50 == 0 else 896
        x = torch.full((size,), float(ranks.struct.rank + 1) * (i + 1))
        if i % 97 == ranks.struct.rank:
            time.sleep(0.001)
        ranks.all_reduce(x)
        total = ranks.struct.num_ranks * (ranks.struct.num_ranks + 1) / 2 * (i + 1)
        number_of_wrong += not bool((x == total).all())
    return number_of_wrong


def for_a_while(ranks: SharedRanks, _: Library, seconds: float) -> int:
    """Sums without a pause, until rank 0 says in one of them that the time is over."""
    number_of_wrong, total = 0, ranks.struct.num_ranks * (ranks.struct.num_ranks + 1) / 2
    began = time.monotonic()
    for i in itertools.count(1):
        x = torch.full((896,), float(ranks.struct.rank + 1) * (i % 1000))
        x[0] = ranks.struct.rank == 0 and time.monotonic() - began > seconds
        ranks.all_reduce(x)
        number_of_wrong += not bool((x[1:] == total * (i % 1000)).all())
        if x[0]:
            return number_of_wrong
    raise AssertionError


@pytest.mark.parametrize(("num_ranks", "count"), sized([(2, 500), (4, 150)], [(2, 5000), (4, 1500)]))
def test_many_sums_follow_each_other(num_ranks: int, count: int) -> None:
    """On a busy machine, each may take the processor's next turn."""
    assert run_ranks(num_ranks, many, count, seconds=240) == [0] * num_ranks


def many_on_one_core(ranks: SharedRanks, library: Library, count: int) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return many(ranks, library, count)


def test_ranks_may_share_one_core() -> None:
    assert run_ranks(3, many_on_one_core, sized(100, 300), seconds=240) == [0] * 3


def other_dtypes(ranks: SharedRanks, _: Library) -> Tensor:
    x = part(ranks.struct.rank, 0, 3, 100).bfloat16()
    ranks.all_reduce(x)
    return x


def test_bf16_is_added_as_fp32_and_rounded_once() -> None:
    expected = in_order([part(rank, 0, 3, 100).bfloat16().float() for rank in range(3)]).bfloat16()
    assert all(torch.equal(found, expected) for found in run_ranks(3, other_dtypes))


SHAPES: list[tuple[tuple[int, ...], int, list[int]]] = [
    ((1, 5), 1, [5, 5, 5]),
    ((4, 33), -1, [33, 40, 1]),
    ((2, 3, 4), 1, [3, 1, 2]),
    ((3, 50_000), 1, [50_000, 50_000, 49_999]),
    ((7, 2), 0, [7, 7, 7]),
    ((6,), 0, [6, 2, 9]),
]


def own_of(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    shape, dim, sizes = SHAPES[number]
    sized = list(shape)
    sized[dim] = sizes[rank]
    return part(rank, number, *sized).to(dtype)


def gather(ranks: SharedRanks, _: Library, dtype: torch.dtype) -> list[Tensor]:
    return [
        ranks.all_gather(own_of(ranks.struct.rank, number, dtype), dim, sizes)
        for number, (_, dim, sizes) in enumerate(SHAPES)
    ]


@pytest.mark.parametrize(("dtype", "num_threads"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_gathered_columns_are_those_of_all_ranks(dtype: torch.dtype, num_threads: int) -> None:
    for found in run_ranks(3, gather, dtype, num_threads=num_threads):
        for number, (_, dim, _) in enumerate(SHAPES):
            expected = torch.cat([own_of(rank, number, dtype) for rank in range(3)], dim)
            assert torch.equal(found[number], expected), number


def tell(ranks: SharedRanks, _: Library) -> list[Tensor]:
    told = []
    for number, size in enumerate((1, 16, 100_000)):
        x = part(ranks.struct.rank, number, size)
        ranks.broadcast(x, number % 3)
        told.append(x)
    return told


def test_broadcasts_bring_what_the_source_has() -> None:
    for found in run_ranks(3, tell):
        for number, size in enumerate((1, 16, 100_000)):
            assert torch.equal(found[number], part(number % 3, number, size))


def add_up_until(ranks: SharedRanks, _: Library, last: int) -> str:
    """Rank 0 goes on; the others stop after `last` sums, and sleep."""
    for i in itertools.count():
        if ranks.struct.rank and i == last:
            time.sleep(100)
        ranks.all_reduce(torch.ones(896))
    raise AssertionError


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_dead_rank_ends_the_wait_of_the_others() -> None:
    with RankProcesses(3, add_up_until, 200, num_threads=2) as ranks:
        time.sleep(1.0)
        pid = ranks.processes[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # Rank 1 sleeps outside; only rank 0 waits, for rank 1 first, then for rank 2.
        os.kill(ranks.processes[1].pid or 0, signal.SIGKILL)
        assert ranks.result(0, seconds=40) in ("RankLostError: rank 1 has died", "RankLostError: rank 2 has died")


def test_a_stopped_rank_costs_the_others_no_core_and_they_end_in_time() -> None:
    """Also helpers of the one that waits sleep."""
    with RankProcesses(2, add_up_until, 1 << 30, num_threads=2, timeout=6) as ranks:
        waiting, stopped = (process.pid or 0 for process in ranks.processes)
        begun = cpu_seconds(stopped) + 0.5
        while cpu_seconds(stopped) < begun:
            time.sleep(0.1)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.5)
        before = cpu_seconds(waiting)
        time.sleep(1.0)
        assert cpu_seconds(waiting) - before < 0.1
        assert ranks.result(0, seconds=60).startswith("RankLostError: rank 1 has not come for 6 seconds")


def test_a_stopped_rank_may_go_on() -> None:
    with RankProcesses(2, for_a_while, 1.5, num_threads=2) as ranks:
        for _ in range(3):
            time.sleep(0.2)
            os.kill(ranks.processes[1].pid or 0, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(ranks.processes[1].pid or 0, signal.SIGCONT)
        assert ranks.results(240) == [0, 0]


def test_a_signal_is_handled_while_a_rank_waits() -> None:
    with RankProcesses(2, add_up_until, 10) as ranks:
        time.sleep(0.5)
        os.kill(ranks.processes[0].pid or 0, signal.SIGTERM)
        assert ranks.result(0, seconds=40) == "SystemExit: terminated"


def test_memory_of_another_process_is_not_joined() -> None:
    memory = RankMemory.create(2)
    pid, number, size, token = memory.address.split(":")
    for wrong in (
        f"{2**22 + 1}:{number}:{size}:{token}",
        f"{pid}:9999:{size}:{token}",
        f"{pid}:{number}:{size}:{'0' * 32}",
        f"{pid}:{number}:{int(size) + 4096}:{token}",
    ):
        with pytest.raises(NotHereError):
            RankMemory.join(wrong, 1, 2)
    with pytest.raises(ValueError, match=f"at most {MAX_RANKS} ranks"):
        RankMemory.create(MAX_RANKS + 1)


def test_memory_has_no_name_that_could_be_left_behind() -> None:
    with RankProcesses(2, add_up_until, 1 << 30) as ranks:
        time.sleep(0.5)
        maps = Path(f"/proc/{ranks.processes[1].pid}/maps").read_text().splitlines()
        (line,) = (line for line in maps if "penstock-ranks" in line)
        assert line.endswith("/memfd:penstock-ranks (deleted)")


WIDE, INNER, TOKENS = 70, 48, 150


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """A table of ids, and two products: the first one's outputs are the other one's inputs."""
    return part(9, 1, 40, WIDE), part(9, 2, INNER, WIDE) / 1e3, part(9, 3, WIDE, INNER) / 1e3


def program_of(library: Library, ranks: SharedRanks | DistantRanks | None, rank: int, num_ranks: int) -> Program:
    """x = table[id]; x += 0.5 * down(up(x)), in which `up` is column-parallel, `down` row-parallel; and 2 * that."""
    table, up, down = weights()
    builder = ProgramBuilder(WIDE)
    x, inner, added = builder.slot(WIDE), builder.slot(INNER), builder.slot(WIDE)
    ids, of_inner = 40 // num_ranks, INNER // num_ranks
    builder.embed(table[rank * ids :][:ids], x, first=rank * ids)
    if ranks is not None:
        builder.reduce(ranks, x, x, WIDE)
    its = slice(rank * of_inner, (rank + 1) * of_inner)
    builder.product(library.pack(up[its]), x, inner)
    builder.product(library.pack(down[:, its].contiguous()), inner, added)
    if ranks is not None:
        builder.reduce(ranks, added, added, WIDE)
        builder.reduce(ranks, added, x, WIDE, added=0.5 / num_ranks)
    else:
        builder.norm(None, added, x, WIDE, added=0.5)
    builder.norm(None, x, ProgramBuilder.OUT, WIDE)
    return builder.build(library, library.pack(part(9, 4, 3, WIDE)))


def forward(program: Program, num_tokens: int) -> Tensor:
    ids = (torch.arange(num_tokens, dtype=torch.int32) * 7) % 40
    lens = torch.tensor([0, num_tokens], dtype=torch.int32)
    return program.forward(ids, ids.long(), lens, lens[1:], [], [], NativePool([]))


def compute(ranks: SharedRanks, library: Library) -> list[Tensor]:
    program = program_of(library, ranks, ranks.struct.rank, ranks.struct.num_ranks)
    return [forward(program, num_tokens) for num_tokens in (1, 5, TOKENS)]


@pytest.mark.parametrize(("num_ranks", "num_threads", "part_bytes"), [(2, 1, 256 << 10), (2, 2, 4096), (4, 1, 4096)])
def test_programs_add_up_what_ranks_have_computed(num_ranks: int, num_threads: int, part_bytes: int) -> None:
    """The bits of a token are the same on all ranks, alone and among others."""
    alone = forward(program_of(load_library(1), None, 0, 1), TOKENS)
    results = run_ranks(num_ranks, compute, num_threads=num_threads, part_bytes=part_bytes)
    first, five, all_tokens = results[0]
    torch.testing.assert_close(all_tokens, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(first, all_tokens[:1])
    assert torch.equal(five, all_tokens[:5])
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def test_rows_longer_than_a_part() -> None:
    results = run_ranks(2, sum_long_rows, part_bytes=4096)
    assert all(torch.equal(found, 2 * part(0, 0, 3, 5000)) for found in results)


def sum_long_rows(ranks: SharedRanks, library: Library) -> Tensor:
    builder = ProgramBuilder(5000)
    x = builder.slot(5000)
    builder.embed(part(0, 0, 3, 5000), x)
    builder.reduce(ranks, x, ProgramBuilder.OUT, 5000)
    program = builder.build(library, library.pack(torch.ones(1, 5000)))
    lens = torch.tensor([0, 3], dtype=torch.int32)
    return program.forward(torch.arange(3, dtype=torch.int32), torch.arange(3), lens, lens[1:], [], [], NativePool([]))


def test_sums_from_elsewhere() -> None:
    """Ranks of several hosts: here the other one is only thought of, and has what this one has."""
    library, sizes = load_library(2), []

    def double(numbers: Tensor) -> None:
        sizes.append(numbers.numel())
        numbers *= 2

    ranks = DistantRanks(library, double)
    program = program_of(library, ranks, 0, 1)
    table, up, down = weights()
    ids = (torch.arange(5) * 7) % 40
    x = 2 * table[ids]
    torch.testing.assert_close(forward(program, 5), x + 2 * (x @ up.T @ down.T), rtol=1e-4, atol=1e-4)
    assert sizes == [5 * WIDE] * 3


def test_what_ends_sums_from_elsewhere_is_raised() -> None:
    library = load_library(1)

    def fail(_: Tensor) -> None:
        raise ConnectionError("rank 1 has gone")

    ranks = DistantRanks(library, fail)
    program = program_of(library, ranks, 0, 1)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 1 has gone"):
            forward(program, 5)
