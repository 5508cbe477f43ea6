"""Two ranks that hold a model together have a part of each adapter, too."""

from pathlib import Path

from tests.e2e.conftest import Checkpoint, checkpoint
from tests.e2e.servers import serving
from tests.faults.streams import all_told, client
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint"]


async def test_two_ranks_say_what_one_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", checkpoint.model, 8)
    asks = [
        {"model": model, "prompt": [3 + i, 6, 7, 8 + i], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        for i in range(4)
        for model in ("m", "one")
    ]
    tokens = []
    for size in ("1", "2"):
        flags = ("--served-model-name", "m", "--dtype", "float32", "--tensor-parallel-size", size)
        async with serving(checkpoint.folder, *flags, f"--lora=one={tmp_path / 'one'}") as server, client() as http:
            tokens.append([one.tokens for one in await all_told(http, server, asks)])
    assert all(len(each) == 12 or each[-1] == 2 for each in tokens[0])
    assert tokens[0] == tokens[1]
    assert tokens[0][::2] != tokens[0][1::2]
