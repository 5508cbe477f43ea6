"""`docker compose up` for real: three services, a stream, a killed worker, and nothing left afterwards.

Runs where a Docker engine answers and PENSTOCK_TEST_DOCKER=1 is set. BASE_IMAGE names another base image;
PENSTOCK_TEST_WHEELS a folder of wheels for the build, such as torch's CPU wheel.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("frontend", "scheduler", "worker")
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml", "compose.scale.yaml", "compose.multi.yaml")


def _engine_answers() -> bool:
    if os.environ.get("PENSTOCK_TEST_DOCKER") != "1" or shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "ls"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not _engine_answers(), reason="needs a Docker engine and PENSTOCK_TEST_DOCKER=1"),
]


class Compose:
    """One compose project in a copy of the source."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        self.project = f"penstock-test-{os.getpid()}"
        self.url = f"http://127.0.0.1:{port}"
        self.environment = os.environ | {
            "COMPOSE_PROJECT_NAME": self.project,
            "PENSTOCK_HTTP_ADDRESS": f"127.0.0.1:{port}",
            "PENSTOCK_IMAGE": "penstock-test",
            "PENSTOCK_NUM_THREADS": "1",
        }

    async def docker(self, *arguments: str) -> str:
        """Run a docker command in the project's folder; its output, or a failure that shows it."""
        process = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            cwd=self.folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        text = output.decode(errors="replace")
        assert process.returncode == 0, f"docker {' '.join(arguments)}:\n{text[-4000:]}"
        return text

    async def inspect(self, service: str) -> dict[str, Any]:
        """What Docker knows of a service's container."""
        container = (await self.docker("compose", "ps", "--all", "-q", service)).strip()
        [found] = json.loads(await self.docker("inspect", container))
        return dict(found)

    async def frontends(self) -> list[str]:
        """The URLs of all frontends, at their own addresses: no proxy is needed."""
        containers = (await self.docker("compose", "ps", "-q", "frontend")).split()
        found = [json.loads(await self.docker("inspect", container))[0] for container in containers]
        networks = [each["NetworkSettings"]["Networks"][f"{self.project}_default"] for each in found]
        return [f"http://{each['IPAddress']}:8000" for each in networks]

    async def leftovers(self) -> dict[str, str]:
        """Containers, networks and volumes of the project, by kind."""
        of_project = f"label=com.docker.compose.project={self.project}"
        return {
            "containers": await self.docker("ps", "-aq", "--filter", of_project),
            "networks": await self.docker("network", "ls", "-q", "--filter", of_project),
            "volumes": await self.docker("volume", "ls", "-q", "--filter", of_project),
        }


@pytest.fixture
async def compose(tmp_path: Path) -> AsyncIterator[Compose]:
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in [*wanted, ".dockerignore", "Dockerfile", *COMPOSE_FILES]:
        source = ROOT / name
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tmp_path / name)
    if wheels := os.environ.get("PENSTOCK_TEST_WHEELS"):
        shutil.copytree(wheels, tmp_path / "wheels", dirs_exist_ok=True)
    project = Compose(tmp_path)
    try:
        yield project
    finally:
        await project.docker("compose", "down", "--volumes", "--remove-orphans", "--timeout", "20")


async def _ask(url: str, question: str, **fields: Any) -> AsyncIterator[str]:
    """The pieces of a streamed greedy answer."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0} | fields
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if text := event["choices"][0]["delta"].get("content"):
                    yield text
            elif line.startswith(b"data: [DONE]"):
                return
    raise AssertionError("the stream ended early")


async def test_three_services_serve_and_leave_nothing(compose: Compose) -> None:
    await compose.docker("compose", "-f", "compose.yaml", "-f", "compose.gpu.yaml", "config", "--quiet")
    await compose.docker("compose", "up", "--detach", "--build", "--wait", "--wait-timeout", "300")

    pieces = [piece async for piece in _ask(compose.url, "What is paged attention?")]
    assert "small pages of equal size" in "".join(pieces)
    assert len(pieces) > 10

    for service in SERVICES:
        found = await compose.inspect(service)
        assert found["State"]["Health"]["Status"] == "healthy"
        assert found["Config"]["User"] == "penstock"
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert all(not mount["RW"] for mount in found["Mounts"] if mount["Type"] == "bind")
        is_reachable = f"{compose.project}_default" in found["NetworkSettings"]["Networks"]
        assert is_reachable == (service == "frontend")

    await _survives_a_killed_worker(compose)
    await _probes_answer_without_a_key(compose)
    await _ends_within_its_grace_period(compose)

    await compose.docker("compose", "stop", "--timeout", "60")
    states = {service: (await compose.inspect(service))["State"] for service in SERVICES}
    assert {service: state["ExitCode"] for service, state in states.items()} == dict.fromkeys(SERVICES, 0)
    await compose.docker("compose", "down", "--volumes")
    assert await compose.leftovers() == {"containers": "", "networks": "", "volumes": ""}


async def _survives_a_killed_worker(compose: Compose) -> None:
    """A stream that runs while the worker is killed pauses and then ends as it would have."""
    question, fields = "Tell me a story about a fox.", {"max_tokens": 400, "ignore_eos": True}
    undisturbed = "".join([piece async for piece in _ask(compose.url, question, **fields)])
    before = (await compose.inspect("worker"))["State"]
    pieces: list[str] = []
    async for piece in _ask(compose.url, question, **fields):
        pieces.append(piece)
        if len(pieces) == 5:
            os.kill(before["Pid"], signal.SIGKILL)
    assert "".join(pieces) == undisturbed
    after = await compose.inspect("worker")
    assert after["State"]["Pid"] != before["Pid"]
    assert after["RestartCount"] == 1


async def _probes_answer_without_a_key(compose: Compose) -> None:
    """What Kubernetes and KServe ask, as deploy/kubernetes has it."""
    async with aiohttp.ClientSession() as session:
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready"):
            async with session.get(compose.url + path) as response:
                assert response.status == 200, path


async def _ends_within_its_grace_period(compose: Compose, num_streams: int = 16) -> None:
    """SIGTERM while streams run: nothing new is accepted, they finish, and the container ends in time, by itself."""
    fields = {"max_tokens": 200, "ignore_eos": True}
    expected = "".join([piece async for piece in _ask(compose.url, "Hello", **fields)])
    begun = [asyncio.Event() for _ in range(num_streams)]

    async def stream(number: int) -> str:
        pieces = []
        async for piece in _ask(compose.url, "Hello", **fields):
            pieces.append(piece)
            begun[number].set()
        return "".join(pieces)

    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    await asyncio.gather(*(each.wait() for each in begun))
    began = asyncio.get_running_loop().time()
    await compose.docker("compose", "stop", "frontend")  # with the grace period of compose.yaml, then SIGKILL
    assert asyncio.get_running_loop().time() - began < 40
    assert await asyncio.gather(*streams) == [expected] * num_streams
    state = (await compose.inspect("frontend"))["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)  # 137 would be SIGKILL
    await compose.docker("compose", "up", "--detach", "--wait", "--wait-timeout", "300")


NUM_STREAMS = 64


async def test_streams_go_on_when_one_of_two_engines_is_killed(compose: Compose) -> None:
    compose.environment |= {"COMPOSE_FILE": "compose.yaml:compose.multi.yaml", "PENSTOCK_ALLOWED_HOSTS": "*"}
    engines = ("scheduler", "worker", "scheduler-1", "worker-1")
    await compose.docker(
        "compose", "up", "--detach", "--build", "--wait", "--wait-timeout", "300", "frontend", *engines
    )
    urls = await compose.frontends()
    assert len(urls) == 2
    await _until_engines_are_ready(urls)
    questions = [f"Tell me story {i} about a fox." for i in range(NUM_STREAMS)]
    expected = await _ask_all(urls, questions)
    for victim in ("worker", "scheduler-1"):
        before = (await compose.inspect(victim))["State"]
        begun = asyncio.Event()
        running = asyncio.create_task(_ask_all(urls, questions, begun))
        await begun.wait()
        os.kill(before["Pid"], signal.SIGKILL)
        assert await running == expected
        assert (await compose.inspect(victim))["RestartCount"] == 1
        await _until_engines_are_ready(urls)
    begun = asyncio.Event()
    running = asyncio.create_task(_ask_all(urls, questions, begun))
    await begun.wait()
    await compose.docker("compose", "stop", "scheduler")  # SIGTERM, which drains it
    assert await running == expected
    assert (await compose.inspect("scheduler"))["State"]["ExitCode"] == 0


async def _ask_all(urls: list[str], questions: list[str], begun: asyncio.Event | None = None) -> list[str]:
    """The answers; `begun` is set once there are some pieces of each, on average."""
    num_pieces = 0

    async def answer(url: str, question: str) -> str:
        nonlocal num_pieces
        text = ""
        async for piece in _ask(url, question, max_tokens=400, ignore_eos=True):
            text += piece
            num_pieces += 1
            if begun is not None and num_pieces > 5 * len(questions):
                begun.set()
        return text

    urls = [urls[i % len(urls)] for i in range(len(questions))]
    return list(await asyncio.gather(*map(answer, urls, questions)))


async def _until_engines_are_ready(urls: list[str]) -> None:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        for url in urls:
            while True:
                async with session.get(f"{url}/health") as response:
                    if (await response.json()).get("engines") == {"0": "ready", "1": "ready"}:
                        break
                await asyncio.sleep(0.2)
