"""States of rows: where they are, what plans do with them, and what is refused with them."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.config import Config, ConfigError
from penstock.gpu_worker.devices.open import open_device
from penstock.gpu_worker.state.state_slots import StateSlots, state_slots
from penstock.ipc.messages import NewRow, SamplingParams, StepPlan
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.state_limits import check_states
from penstock.options import config_of

RAW: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
}
NOTHING = StepPlan(step_id=0, rows=b"", start=b"", num_new=b"", samples=b"")


def hybrid() -> Decoder:
    config = parse_model_config(RAW, "own")
    assert isinstance(config, Decoder)
    return config


def slots() -> StateSlots:
    found = state_slots(hybrid(), 3, torch.device("cpu"), num_snapshots=2)
    assert found is not None
    return found


def pairs(*numbers: tuple[int, int]) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def test_only_layers_with_states_have_them() -> None:
    found = slots()
    assert sorted(found.layers) == [0, 2]
    conv, scan = found.layers[0]
    assert conv.shape == (3, 3, 64 + 2 * 5)
    assert scan.shape == (3, 4, 5, 16)
    assert {conv.dtype, scan.dtype} == {torch.float32}, "whatever activations are"
    assert hybrid().state_bytes == 2 * 4 * (3 * 74 + 4 * 5 * 16)


def test_rows_begin_with_nothing_or_with_a_snapshot() -> None:
    found, device = slots(), open_device("cpu", 1)
    for parts in found.layers.values():
        for part in parts:
            part.copy_(torch.randn_like(part))
    before = {layer: [part.clone() for part in parts] for layer, parts in found.layers.items()}
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    new = tuple(NewRow(row, b"", 0, sampling, b"") for row in (0, 1))
    copies = {"state_saves": pairs((0, 1), (2, 0)), "state_loads": pairs((1, 1))}
    found.begin(replace(NOTHING, new_rows=new, **copies), device)  # row 0 was another sequence's until now
    for layer, parts in found.layers.items():
        for part, was in zip(parts, before[layer], strict=True):
            assert not part[0].any()
            assert torch.equal(part[1], was[0])
            assert torch.equal(part[2], was[2])


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--speculative-config", {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}),
        ("--host-kv-gib", {"host_kv_gib": 1.0}),
        ("--disk-kv", {"disk_kv": "somewhere:1"}),
        ("--role", {"role": ("both",)}),
    ],
)
def test_what_pages_alone_would_allow_is_refused(flag: str, options: dict[str, Any]) -> None:
    config: Config = config_of({"model": "somewhere", **options})
    with pytest.raises(ConfigError, match=f"^{flag}: layers of BambaForCausalLM keep a state of each row"):
        check_states(hybrid(), config)
