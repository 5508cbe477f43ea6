"""Workers that share a machine keep to cores of its NUMA nodes."""

from pathlib import Path

import pytest

from penstock.config import Config, ranks
from penstock.config.cores import cores_of_worker
from penstock.config.ranks import Rank


def machine(folder: Path, nodes: list[str], num_threads: int = 1) -> tuple[Path, Path]:
    """What a system says of its nodes' cores; thread t of core c has number c + t * cores."""
    numbers: list[int] = []
    for i, listed in enumerate(nodes):
        node = folder / f"node{i}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(listed + "\n")
        for part in listed.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    num_cores = len(numbers) // num_threads
    for number in numbers:
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        siblings = ",".join(str(number % num_cores + i * num_cores) for i in range(num_threads))
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    (folder / "possible").write_text("0-1\n")
    return folder, folder


def shares(count: int, usable: set[int], where: tuple[Path, Path]) -> list[tuple[int, ...]]:
    return [cores_of_worker(number, count, usable, *where) for number in range(count)]


def test_each_worker_has_a_node(tmp_path: Path) -> None:
    where = machine(tmp_path, ["0-3", "4-7"])
    assert shares(2, set(range(8)), where) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert shares(4, set(range(8)), where) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_worker_may_have_several_nodes(tmp_path: Path) -> None:
    where = machine(tmp_path, ["0-1", "2-3", "4-5", "6-7"])
    assert shares(2, set(range(8)), where) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    where = machine(tmp_path, ["0-3,8-11", "4-7,12-15"], num_threads=2)
    assert shares(4, set(range(16)), where) == [(0, 8, 1, 9), (2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15)]


def test_only_cores_that_may_be_used(tmp_path: Path) -> None:
    where = machine(tmp_path, ["0-3", "4-7"])
    assert shares(2, {1, 2, 5, 6}, where) == [(1, 2), (5, 6)]
    assert shares(2, {0, 1, 2}, where) == [(), ()], "all are of one node"


@pytest.mark.parametrize("nodes", [[], ["0-3"], ["0-3", ""]])
def test_with_one_node_or_none_no_worker_keeps_to_any(tmp_path: Path, nodes: list[str]) -> None:
    where = machine(tmp_path, [listed for listed in nodes if listed])
    if "" in nodes:  # a node of memory alone
        (tmp_path / "node1").mkdir()
        (tmp_path / "node1" / "cpulist").write_text("\n")
    assert shares(2, set(range(4)), where) == [(), ()]


def test_more_workers_than_cores_keep_to_none(tmp_path: Path) -> None:
    assert set(shares(4, {0, 1}, machine(tmp_path, ["0", "1"]))) == {()}


def test_the_launch_tells_a_worker_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "cores_of_worker", lambda number, count: tuple(range(4 * number, 4 * number + 4)))
    rank = Rank(1, 2, 1, 2).on_this_machine()
    assert rank.cores == (12, 13, 14, 15)
    assert Rank.of(list(rank.arguments)) == rank
    assert rank.share(Config()).worker.num_threads == 4
    assert Rank().on_this_machine().cores == ()
    assert "--cores" not in Rank(1, 2).arguments
