"""The worker dies under rows with adapters, and of reading one: each stream says what it would have said anyway."""

from pathlib import Path

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.conftest import Checkpoint, checkpoint
from tests.e2e.servers import serving
from tests.faults.streams import all_told, bodies, check_equal, client
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint"]
NAMES = ("m", "one", "two")


async def test_rows_with_adapters_go_on(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """While adapters take turns in one slot: a worker dies in a step, and the next one as it reads a second adapter.

    Both come whatever the order in which requests arrive: rows of either adapter need more than six steps.
    """
    for number, name in enumerate(NAMES[1:]):
        write_adapter(tmp_path / name, checkpoint.model, 4 + number, seed=number)
    flags = ("--served-model-name", "m", "--dtype", "float32", "--max-loras", "1", "--cpu-kernels", "native")
    adapters = tuple(f"--lora={name}={tmp_path / name}" for name in NAMES[1:])
    environment = {FAULTS: "worker.computed:kill@6,worker.adapter:kill@2", ONCE: str(tmp_path)}
    asks = [body | {"model": NAMES[i % 3]} for i, body in enumerate(bodies(12))]
    async with serving(checkpoint.folder, *flags, *adapters, **environment) as server, client() as http:
        found = await all_told(http, server, asks)
        deaths = [entry for entry in server.log if entry["event"] == "process exited, restarting"]
        assert [entry["child"] for entry in deaths] == ["penstock-worker-0"] * 2
        expected = await all_told(http, server, asks)
        check_equal(found, expected)
        of_model = await all_told(http, server, [body | {"model": "m"} for body in asks])
        differ = [one.tokens != other.tokens for one, other in zip(expected, of_model, strict=True)]
        assert not any(differ[::3])
        assert any(differ)
        await server.settled(http)
