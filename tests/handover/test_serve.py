"""`penstock serve` with a prefill and a decode engine, over HTTP, as its users have it."""

import asyncio
import re
import sys
from argparse import Namespace
from pathlib import Path

import aiohttp
import pytest

from penstock.config import ConfigError
from penstock.config.engines import of_engine
from penstock.config.flags import config_from
from penstock.parts.handover.options import HandoverOptions
from tests.e2e.checkpoints import greedy, make_checkpoint
from tests.e2e.servers import serving

PROMPT = list(range(10, 90)) * 2


async def test_a_server_with_roles(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m")
    options = (
        "--served-model-name",
        "m",
        "--data-parallel-size",
        "2",
        "--role",
        "prefill,decode",
        "--dtype",
        "float32",
        "--num-pages",
        "100",
    )
    async with serving(tmp_path / "m", *options) as server, aiohttp.ClientSession() as http:
        for name in ("penstock-scheduler-0", "penstock-scheduler-1"):
            await server.logged("worker connected", process=name)
        await asyncio.sleep(0.5)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert answer["choices"][0]["token_ids"] == greedy(model, PROMPT, 20)
        told = ""
        for _ in range(50):
            async with http.get(f"{server.url}/metrics") as response:
                told = await response.text()
            if len(re.findall(r"penstock_handover_pages_total{[^}]*} 9.0", told)) == 2:
                break
            await asyncio.sleep(0.1)
        for engine, role in (("1", "both"), ("0", "decode"), ("1", "prefill")):
            command = [sys.executable, "-m", "penstock.cli", "role", engine, role, "--url", server.url]
            told_by = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert (await told_by.communicate())[0].decode() == f"engine {engine}: {role}\n"
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"{server.url}/engines") as response:
                    roles = {each["id"]: each["role"] for each in (await response.json())["data"]}
                if roles == {"0": "decode", "1": "prefill"}:
                    break
                await asyncio.sleep(0.1)
        async with http.post(f"{server.url}/engines/0/role", json={"role": "nothing"}) as response:
            assert response.status == 400
        body["prompt"] = PROMPT[::-1]
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["token_ids"] == greedy(model, PROMPT[::-1], 20)
        await asyncio.sleep(0.5)
        async with http.get(f"{server.url}/metrics") as response:
            again = await response.text()
        assert len(re.findall(r'penstock_handover_prompts_total{[^}]*result="sent"} 1.0', again)) == 2
        assert len(re.findall(r"penstock_handover_pages_total{[^}]*} 9.0", told)) == 2, "sent by one, received by one"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"role": ["prefill", "decode"]}, "--data-parallel-size 1"),
        ({"role": ["prefill"] * 2, "data_parallel_size": 3}, "--role prefill,prefill"),
        ({"role": ["both"], "enable_prefix_caching": False}, "prefix cache"),
        ({"role": ["neither"]}, "'neither'"),
        ({"role": ["both"], "kv_transfer_address": "tcp://host:1"}, "--channel-key-file"),
        ({"rendezvous_address": "tcp://0.0.0.0:29500"}, "'tcp://0.0.0.0:29500' is no place to meet"),
        ({"rendezvous_address": "tcp://[::]:29500"}, "is no place to meet"),
        ({"rendezvous_address": "tcp://host-0:29500"}, "needs --channel-key-file"),
        ({"rendezvous_address": "tcp://127.0.0.1:29500"}, "listen on all addresses of their hosts"),
        ({"rendezvous_address": "tcp://host-0"}, "it must be tcp://HOST:PORT"),
        ({"rendezvous_address": "ipc://x"}, "it must be tcp://HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        config_from(Namespace(**options), {})


def test_each_engine_gets_its_own_role() -> None:
    addresses = dict.fromkeys(("frontend_address", "worker_address"), "ipc://a,ipc://b")
    addresses["rendezvous_address"] = "file:///a,file:///b"
    config = config_from(Namespace(role=["prefill,decode"], data_parallel_size=2, **addresses), {})
    assert [of_engine(config, number).of(HandoverOptions).role for number in (0, 1)] == [("prefill",), ("decode",)]
    config = config_from(Namespace(role=["both"], data_parallel_size=2, **addresses), {})
    assert [of_engine(config, number).of(HandoverOptions).role for number in (0, 1)] == [("both",), ("both",)]
