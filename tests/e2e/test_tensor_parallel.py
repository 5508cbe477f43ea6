"""What cannot be spread over workers is refused. What it streams if it can: `tests/faults/test_layouts.py`."""

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, start


async def test_what_cannot_be_split_is_refused_before_anything_starts(checkpoint: Checkpoint) -> None:
    process = await start("--model", str(checkpoint.folder), "--tensor-parallel-size", "64")
    server = Server(process)
    assert await server.ended() != 0
    said = " ".join(str(entry) for entry in server.log)
    assert "--tensor-parallel-size 64" in said
    assert "it can be split over" in said
    assert not [entry for entry in server.log if entry["event"] == "loading"]
