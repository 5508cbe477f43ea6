"""The log line that says where a GPU's memory went."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from structlog.testing import capture_logs

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.startup.memory_ledger import MemoryLedger

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_each_part_has_what_came_since_the_one_before(kind: str) -> None:
    in_use = iter([400, 2400, 7400, 7500, 7700, 7900, 7900])
    device = SimpleNamespace(torch_device=torch.device(kind), memory_use=lambda: (next(in_use) * MIB, 10_000 * MIB))
    with capture_logs() as lines:
        ledger = MemoryLedger(cast(Device, device))
        for part in ("weights", "pool_and_rows", "graphs", "first_steps", "graphs"):
            ledger.note(part)
        ledger.tell(300 * MIB)
    sizes = {"other": 400, "weights": 2000, "pool_and_rows": 5000, "graphs": 300, "first_steps": 200, "free": 2100}
    told = {f"{name}_mib": mib for name, mib in (sizes | {"largest_step": 300}).items()}
    assert lines == ([{"event": "memory", "log_level": "info", **told}] if kind == "cuda" else [])
