"""The parts of the application for Ray Serve that need no cluster: arguments, the policy, links that come and go."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq
from prometheus_client import CollectorRegistry

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-llm[ray]'")

from penstock.cli.__main__ import main
from penstock.config import Config, ConfigError, SchedulerOptions
from penstock.config.groups.parallel import ParallelOptions
from penstock.core.launch.launchers import addressed
from penstock.deploy.ray.autoscaling import ROWS, RUNNING, WAITING_TOKENS, WaitingTokens
from penstock.deploy.ray.engine import EngineCard
from penstock.deploy.ray.fleet import Fleet
from penstock.deploy.ray.settings import read_args
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import EngineRouter
from penstock.ipc.messages import AddRequest, SamplingParams
from tests.frontend.conftest import sockets as sockets
from tests.frontend.engine.test_two_engines import TOKENS, Sink, check, until
from tests.frontend.fake_scheduler import FakeScheduler, Script

# --- arguments ------------------------------------------------------------------------------------


def test_arguments_are_options_and_settings() -> None:
    [plan] = read_args({"model": "org/name", "max_num_seqs": "8", "max_engines": "3", "enable_prefix_caching": "false"})
    assert (plan.name, plan.config.scheduler.max_num_seqs) == ("org/name", 8)
    assert (plan.config.scheduler.enable_prefix_caching, plan.settings.most_engines) == (False, 3)
    [plan] = read_args({})
    assert (plan.name, plan.settings.min_engines, plan.settings.most_engines) == ("penstock-demo", 1, 1)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"max_num_seq": 3}, "max-num-seqs"),
        ({"port": 8000}, "port has no effect on Ray Serve: Ray Serve has the HTTP server"),
        ({"data_parallel_size": 2}, "min_engines"),
        ({"worker_address": "tcp://a:1"}, "addresses"),
        ({"role": "decode"}, "each for itself"),
        ({"max_num_seqs": -1}, "max-num-seqs -1"),
        ({"head_timeout": 3.0}, "head-timeout is gone; a request's head"),
        ({"pipeline_depth": 0}, "pipeline-depth is gone"),
        ({"max_engines": -1}, "max_engines"),
        ({"min_engines": 0}, "min_engines"),
        ({"min_engines": 3, "max_engines": 2}, "less than min_engines"),
        ({"models": []}, "models must be a list"),
        ({"models": [{}, {}]}, "names of their own"),
        ({"models": [{"num_frontends": 2}]}, "beside"),
    ],
)
def test_arguments_that_cannot_work(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_args(args)


def test_several_models_share_what_stands_beside_them() -> None:
    models = [{"served_model_name": "a"}, {"served_model_name": "b", "max_num_seqs": 2, "max_engines": 5}]
    first, second = read_args({"max_num_seqs": 4, "models": models})
    assert (first.name, first.config.scheduler.max_num_seqs, first.settings.most_engines) == ("a", 4, 1)
    assert (second.name, second.config.scheduler.max_num_seqs, second.settings.most_engines) == ("b", 2, 5)


def test_ranks_are_in_a_placement_group_unless_they_are_to_stay_on_one_node() -> None:
    assert read_args({"tensor_parallel_size": "2"})[0].config.parallel.launcher == "ray"
    assert read_args({"tensor_parallel_size": "2", "launcher": "local"})[0].config.parallel.launcher == "local"
    assert read_args({})[0].config.parallel.launcher == "local"


@pytest.mark.parametrize("command", ["worker", "scheduler", "frontend"])
def test_only_a_whole_server_has_a_launcher(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--launcher", "ray"]) == 2
    assert "--launcher ray is for `penstock serve`" in capsys.readouterr().err


def test_a_launcher_needs_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError))
    with pytest.raises(ConfigError, match="finds no Ray cluster"):
        addressed(Config(parallel=ParallelOptions(launcher="ray")), tmp_path)


# --- how many engines -----------------------------------------------------------------------------


@dataclass
class Context:
    """What Serve gives a policy."""

    aggregated_metrics: Any
    target_num_replicas: int = 1


def wanted(*engines: tuple[float, float, float]) -> float:
    """For engines with so many waiting tokens, rows in use, and rows."""
    names = (WAITING_TOKENS, RUNNING, ROWS)
    told = {name: dict(enumerate(values)) for name, values in zip(names, zip(*engines, strict=True), strict=True)}
    number, state = WaitingTokens(1000)(Context(told))
    assert state == {}
    return number


def test_engines_follow_rows_in_use_and_waiting_tokens() -> None:
    assert wanted((0, 0, 8)) == 0  # Serve's bounds make it one
    assert wanted((0, 4, 8)) == 1
    assert wanted((0, 8, 8)) == 1
    assert wanted((100, 8, 8)) == 2
    assert wanted((2100, 8, 8)) == 4
    assert wanted((0, 8, 8), (0, 8, 8)) == 2
    assert wanted((0, 3, 8), (0, 3, 8)) == 1  # what both do fits one
    assert WaitingTokens()(Context(None, target_num_replicas=3))[0] == 3  # nobody has reported: nothing changes
    assert WaitingTokens()(Context({}, target_num_replicas=3))[0] == 3


# --- engines that come and go -----------------------------------------------------------------------


class Cluster:
    """Engines with their cards, and a fleet that follows them."""

    def __init__(self, sockets: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines = {
            name: FakeScheduler(f"ipc://{sockets}/engine-{name}.sock", vocab_size=100) for name in ("a", "b", "c")
        }
        for engine in self.engines.values():
            engine.script = lambda request, i: Script(TOKENS, delay=0.02)
        self.there = ["a"]
        self.fleet = Fleet(self.ask, self.connect, 0.02)

    async def ask(self) -> list[EngineCard]:
        return [EngineCard(name, self.engines[name].address, b"", b"") for name in self.there]

    def connect(self, card: EngineCard) -> EngineLink:
        to = EngineAddress(card.address, "frontend", "0" * 16, 0.1, 0.5, label=card.name)
        return EngineLink(to, over_sockets(self.context), print)

    async def start(self) -> None:
        limits = SchedulerOptions()
        router = EngineRouter("prefix", limits, CollectorRegistry())
        self.book = RequestBook(await self.fleet.first(), limits, router)
        self.following = asyncio.create_task(self.fleet.follow(self.book))

    def submit(self, name: str) -> Sink:
        sink = Sink()
        self.book.submit(AddRequest(name, b"\x03\0\0\0", SamplingParams(max_tokens=100, stop_token_ids=(2,))), sink)
        return sink

    def labels(self) -> list[str]:
        return [link.to.label for link in self.book.links]

    async def close(self) -> None:
        self.following.cancel()
        await self.book.close()
        for engine in self.engines.values():
            engine.close()
        self.context.term()


@pytest.fixture
async def cluster(sockets: Path) -> AsyncIterator[Cluster]:
    made = Cluster(sockets)
    await made.start()
    await until(made.book.ready.is_set)
    yield made
    await made.close()


async def test_streams_move_from_an_engine_that_is_to_end(cluster: Cluster) -> None:
    sinks = [cluster.submit(f"request-{i}") for i in range(3)]
    await until(lambda: all(sink.token_ids for sink in sinks))
    cluster.there = ["a", "b"]
    await until(lambda: cluster.labels() == ["a", "b"] and cluster.book.links[1].facts is not None)
    cluster.there = ["b"]
    await until(lambda: cluster.labels() == ["b"])
    await until(lambda: cluster.engines["a"].num_running == 0)  # nothing is left there: it may end
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    assert all(request.progress for request in cluster.engines["b"].added)


async def test_the_last_engine_keeps_its_streams_until_another_is_ready(cluster: Cluster) -> None:
    sink = cluster.submit("request")
    await until(lambda: sink.token_ids)
    cluster.engines["c"].set_ready(False)
    cluster.there = []  # nobody knows, or there is none
    await asyncio.sleep(0.1)
    cluster.there = ["c"]  # one that still loads its model
    await until(lambda: cluster.labels() == ["a", "c"])
    await asyncio.sleep(0.1)
    assert cluster.labels() == ["a", "c"]
    assert cluster.engines["a"].num_running == 1
    cluster.engines["c"].set_ready(True)
    await until(lambda: cluster.labels() == ["c"])
    await until(lambda: sink.finish_reason)
    check(sink)
