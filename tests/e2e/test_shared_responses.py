"""Two frontends: whichever answers knows what the other has stored, also when the other is gone."""

from pathlib import Path

import aiohttp

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import serving


async def test_responses_are_known_to_every_frontend(checkpoint: Checkpoint, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    flags = ("--num-frontends", "2", "--chat-template", template)
    async with serving(checkpoint.folder, *flags) as server:
        url, body = f"{server.url}/v1/responses", {"input": "Hello", "max_output_tokens": 4}

        async def ask(**fields: str) -> str:
            """On a connection of its own: the system chooses the frontend."""
            async with aiohttp.ClientSession() as http, http.post(url, json=body | fields) as answer:
                assert answer.status == 200, await answer.text()
                return str((await answer.json())["id"])

        last = await ask()
        for _ in range(12):
            last = await ask(previous_response_id=last)
        position = len(server.log)
        server.children()["penstock-frontend-0"].kill()
        await server.logged("listening", after=position)
        for _ in range(8):
            last = await ask(previous_response_id=last)
