"""A batch outlives the processes: each request is answered once, and with the same bytes as if nothing had happened."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.servers import Server, serving, start
from tests.faults.soak import IS_SOAK, only_in_soak, sized
from tests.faults.streams import client

NUM_REQUESTS = sized(30, 2000)
SECONDS = sized(400, 3000)


def requests(*, are_seeded: bool) -> bytes:
    """Without seeds, what is drawn follows from the batch's id, which offline follows from the file."""
    lines = []
    for number in range(NUM_REQUESTS):
        body: dict[str, Any] = {"max_tokens": 4 + number % 20, "temperature": 1.0}
        body |= {"seed": number} if are_seeded else {}
        body["messages"] = [{"role": "user", "content": f"Count to {number % 50}."}]
        url = "/v1/chat/completions"
        lines.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}) + "\n")
    return "".join(lines).encode()


async def create(server: Server, content: bytes) -> dict[str, Any]:
    async with client() as http:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", content, filename="in.jsonl")
        async with http.post(f"{server.url}/v1/files", data=form) as answer:
            file_id = (await answer.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with http.post(f"{server.url}/v1/batches", json=body) as answer:
            assert answer.status == 200, await answer.text()
            made: dict[str, Any] = await answer.json()
            return made


async def wait(server: Server, batch: dict[str, Any], num_completed: int) -> dict[str, Any]:
    async with client() as http:
        while True:
            async with http.get(f"{server.url}/v1/batches/{batch['id']}") as answer:
                now: dict[str, Any] = await answer.json()
            assert now["status"] in ("validating", "in_progress", "finalizing", "completed"), now
            is_enough = now["request_counts"]["completed"] >= num_completed
            if now["status"] == "completed" or (is_enough and num_completed < NUM_REQUESTS):
                return now
            await asyncio.sleep(0.1)


async def results(server: Server, batch: dict[str, Any]) -> bytes:
    """The output, without what names its batch."""
    async with client() as http, http.get(f"{server.url}/v1/files/{batch['output_file_id']}/content") as answer:
        content = await answer.read()
    content = content.replace(batch["id"].removeprefix("batch_").encode(), b"ID")
    return content.replace(b'"created":%d' % batch["created_at"], b'"created":0')


@pytest.mark.timeout(SECONDS)
async def test_every_process_is_killed_in_the_middle(tmp_path: Path) -> None:
    flags = ("--data-dir", tmp_path / "data", "--max-num-seqs", "16", "--num-frontends", "2")
    process = await start(*flags)
    first = Server(process)
    first.url = (await first.logged("serving"))["url"]
    content = requests(are_seeded=True)
    made = await create(first, content)
    await wait(first, made, NUM_REQUESTS // 3)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    await first.ended()
    async with serving(*flags) as second:
        disturbed = await wait(second, made, NUM_REQUESTS)
        assert disturbed["request_counts"] == {"total": NUM_REQUESTS, "completed": NUM_REQUESTS, "failed": 0}
        found = await results(second, disturbed)
        assert [json.loads(line)["custom_id"] for line in found.splitlines()] == [
            f"r{number}" for number in range(NUM_REQUESTS)
        ]
        undisturbed = await wait(second, await create(second, content), NUM_REQUESTS)
        assert await results(second, undisturbed) == found


async def run_batch(source: Path, target: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "run-batch", "-i", source, "-o", target, "--num-threads", "1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@only_in_soak
@pytest.mark.timeout(SECONDS)
async def test_run_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(requests(are_seeded=False))
    process = await run_batch(source, target)
    if IS_SOAK:
        while not target.exists() or target.read_bytes().count(b"\n") < NUM_REQUESTS // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        process.kill()
        await process.wait()
        process = await run_batch(source, target)
    _, told = await process.communicate()
    assert process.returncode == 0, told
    whole = target.read_bytes()
    assert [json.loads(line)["custom_id"] for line in whole.splitlines()] == [f"r{i}" for i in range(NUM_REQUESTS)]
    lines = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(lines[1::2]) + lines[0][:50])  # as when it was killed while writing
    process = await run_batch(source, target)
    _, told = await process.communicate()
    assert process.returncode == 0, told
    assert f"{NUM_REQUESTS - NUM_REQUESTS // 2} of {NUM_REQUESTS}".encode() in told
    assert target.read_bytes() == whole
