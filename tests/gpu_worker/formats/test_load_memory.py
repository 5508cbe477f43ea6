"""What loading a quantized checkpoint holds: the packed weights, and one layer's as they are read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.checkpoints import edit_config, make_checkpoint
from tests.kernels.native.native_library import load_library

LAYERS, HIDDEN, INNER = 8, 1024, 3072
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from penstock.models.finding.registry import open_checkpoint
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.loading.loader import load_model, load_model_config
from penstock.kernels.native.library import Library

folder, library, peak, ends = Path(sys.argv[1]), Library(Path(sys.argv[2]), 1), 0, threading.Event()

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10

def watch():
    global peak
    while not ends.is_set():
        peak = max(peak, private())
        time.sleep(0.0005)

config = load_model_config(folder)
checkpoint = open_checkpoint(folder)
torch.set_num_threads(1)
before = private()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(checkpoint, config, torch.float32, CpuDevice(1, library))
ends.set()
watcher.join()
assert model.kernels == "native"
print(peak - before, private() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_model_is_not_in_memory_twice(tmp_path: Path) -> None:
    library = Path(load_library(1).functions._name)
    make_checkpoint(
        tmp_path,
        "llama",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        head_dim=64,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    path = tmp_path / "model.safetensors"
    stored, num_weights = {}, 0
    for name, tensor in load_file(path).items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        num_outputs, num_inputs = tensor.shape
        num_weights += tensor.numel()
        codes = torch.randint(-(2**31), 2**31, (num_outputs, num_inputs // 8), dtype=torch.int32)
        stored[f"{name}_packed"], stored[f"{name}_shape"] = codes, torch.tensor(tensor.shape)
        stored[f"{name}_scale"] = torch.full((num_outputs, num_inputs // 128), 0.001).bfloat16()
    save_file(stored, path)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    edit_config(
        tmp_path,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(library)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back to the system
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, kept = map(int, done.stdout.split())
    packed, layer = num_weights // 2, num_weights // LAYERS  # bytes; a code that is not packed takes one
    assert kept > packed
    assert peak < kept + layer
