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
    for name in [*wanted, ".dockerignore", "Dockerfile", "compose.yaml", "compose.gpu.yaml"]:
        source = ROOT / name
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
