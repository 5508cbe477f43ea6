"""Every format in models: in any schedule, greedy tokens and log-probabilities are those of the weights as floats."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers.utils.quantization_config import Mxfp4Config

from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.run import check, texts_of
from tests.gpu_worker.families.schedules import IS_LONG, schedules
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.formats import writers
from tests.gpu_worker.formats.reference import QuantizedReference
from tests.gpu_worker.formats.writers import Writer

INT = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
TOKEN = {"strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Callable[[], Writer], str]] = {
    "gptq-4-order": (lambda: writers.gptq(4, 32, has_order=True), "llama"),
    "gptq-odd-groups": (lambda: writers.gptq(8, 24), "llama"),
    "gptq-8": (lambda: writers.gptq(8, -1, version=2), "qwen2"),
    "gptq-mixtral": (lambda: writers.gptq(4, 32), "mixtral"),
    "awq": (lambda: writers.awq(32), "llama"),
    "awq-qwen3-moe": (lambda: writers.awq(16), "qwen3_moe"),
    "packed": (lambda: writers.compressed("pack-quantized", GROUPS), "llama"),
    "packed-asymmetric": (lambda: writers.compressed("pack-quantized", {**GROUPS, "symmetric": False}), "qwen3"),
    "packed-8": (lambda: writers.compressed("pack-quantized", {**INT, "strategy": "channel"}), "qwen3"),
    "w8a8": (lambda: writers.compressed("int-quantized", {**INT, "strategy": "channel"}, {**INT, **TOKEN}), "llama"),
    "fp8": (
        lambda: writers.compressed("float-quantized", {**FP8, "strategy": "channel"}, {**FP8, **TOKEN}),
        "llama",
    ),
    "fp8-dense": (lambda: writers.fp8(32), "llama"),
    "fp8-static": (lambda: writers.fp8(None), "llama"),
    "fp8-qwen3-moe": (lambda: writers.fp8(32), "qwen3_moe"),
    "fp8-nemotron-h": (lambda: writers.fp8(32), "nemotron_h-experts"),
    "fp8-deepseek": (lambda: writers.fp8(32), "deepseek_v3"),
    "nf4": (writers.nf4, "llama"),
    "int8": (writers.int8, "llama"),
    "mxfp4-gpt-oss": (writers.mxfp4, "gpt_oss"),
}


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], QuantizedReference]:
    made: dict[str, QuantizedReference] = {}

    def find(name: str) -> QuantizedReference:
        if name not in made:
            made.clear()
            write, case = FORMATS[name]
            made[name] = QuantizedReference(tmp_path_factory.mktemp(name), case_of(case, write()), write())
        return made[name]

    return find


def case_of(name: str, writer: Writer) -> Case:
    """A family's; where inputs are rounded, with two layers: of those whose kinds are listed, one with experts."""
    case = CASES[name]
    if writer.rounded is None:
        return case
    if "layers_block_type" in case.changes:
        return case._replace(changes={**case.changes, "layers_block_type": ["full_attention", "moe"]})
    return case._replace(changes={**case.changes, "num_hidden_layers": 2, "first_k_dense_replace": 1})


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", FORMATS)
def test_greedy(find: Callable[[str], QuantizedReference], name: str, kernels: str) -> None:
    reference, runs = find(name), schedules(list(FORMATS).index(name))
    reference.first_answers = {} if kernels == "native" else None
    for run in runs if IS_LONG else runs[:1]:
        check(reference, run, cpu_kernels=kernels)


@pytest.mark.parametrize("name", ["packed", "packed-8", "w8a8", "fp8", "fp8-dense", "mxfp4-gpt-oss"])
def test_transformers_read_the_same_file(find: Callable[[str], QuantizedReference], name: str) -> None:
    """Its logits are those of the reference. Of FP8 by blocks and of MXFP4 it makes floats on a CPU.

    Packed weights with zero points are beyond it: it expects these in another shape.
    """
    reference = find(name)
    is_mxfp4 = name.startswith("mxfp4")
    settings = {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        reference.folder, dtype=torch.float32, attn_implementation="eager", **settings
    ).eval()
    # Its range of int8 is from -128 to 127, and the scale is made for 127.5.
    rounded = {"w8a8": lambda x: writers.round_to_int8(x, None, None, 127.5), "fp8": reference.writer.rounded}.get(name)
    for text in texts_of(reference.case)[:2]:
        with torch.inference_mode():
            theirs = model(torch.tensor([text])).logits[0].log_softmax(-1)
        ours = reference.logits(text).log_softmax(-1) if rounded is None else reference.rounded_scores(text, rounded)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
