"""`penstock serve` with all that its listeners may have: TLS, keys, administrators' port, and SIGHUP for new files."""

import signal
import ssl
from pathlib import Path

import aiohttp

from penstock.config.api_keys import digest
from penstock.config.listening import bind
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import serving
from tests.frontend.http.certificates import make_pair, needs_openssl


def write_keys(file: Path, *keys: str) -> None:
    """Each with a namespace of its own."""
    common = 'scopes = ["infer", "metrics"]'
    file.write_text(
        "".join(f'[[keys]]\nid = "{k}"\nsha256 = "{digest(k).hex()}"\nnamespace = "{k}"\n{common}\n' for k in keys)
    )


@needs_openssl
async def test_two_frontends_with_everything(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "tls")
    keys = tmp_path / "keys.toml"
    write_keys(keys, "old", "other")
    with bind("127.0.0.1", 0, is_shared=False) as free:
        admin_port = free.getsockname()[1]
    flags = ["--host", "0.0.0.0", "--api-keys-file", keys, "--admin-port", admin_port, "--num-frontends", 2]
    flags += ["--tls-certificate", pair.certificate, "--tls-key", pair.key]
    tls = ssl.create_default_context(cafile=str(pair.certificate))

    async with serving(checkpoint.folder, *map(str, flags)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        [admin_url] = [line["admin_url"] for line in server.log if line["event"] == "serving"]
        assert admin_url == f"https://127.0.0.1:{admin_port}"

        async def status(url: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession() as http, http.get(url, headers=headers, ssl=tls) as answer:
                return answer.status

        assert await status(f"{server.url}/v1/models", "old") == 200
        assert await status(f"{server.url}/metrics", "old") == 404
        assert await status(f"{admin_url}/metrics", "old") == 200
        assert await status(f"{admin_url}/v1/models", "old") == 404

        async def num_cached(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": [5 + i % 50 for i in range(64)], "max_tokens": 1}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{server.url}/v1/completions", json=body, headers=headers, ssl=tls) as answer,
            ):
                usage = (await answer.json())["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached("old") == 0
        assert await num_cached("old") >= 32
        assert await num_cached("other") == 0

        write_keys(keys, "new")
        position = len(server.log)
        server.process.send_signal(signal.SIGHUP)
        for frontend in ("penstock-frontend-0", "penstock-frontend-1"):
            await server.logged("API keys reloaded", after=position, process=frontend)
        for _ in range(6):  # whichever takes the connection
            assert await status(f"{server.url}/v1/models", "old") == 401
            assert await status(f"{server.url}/v1/models", "new") == 200
        assert not [line for line in server.log if line["event"] == "process exited, restarting"]
