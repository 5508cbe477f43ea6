"""Converts checkpoint folders to GGUF by llama.cpp's own converter. Runs in a process of its own.

    python convert.py LLAMA_CPP_SOURCE KIND PRE FOLDER FILE.gguf [FOLDER FILE.gguf ...]

KIND is f32, f16, bf16 or q8_0. PRE is what the tokenizer's texts are split by: the converter knows it by the ids of a
text, which those of test tokenizers are not among. "-": the vocabulary is left out.
"""

import sys
from pathlib import Path

source, kind, pre, *files = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import get_model_class  # type: ignore[import-not-found] # noqa: E402
from conversion.base import ModelBase, ModelType, get_model_architecture  # type: ignore[import-not-found] # noqa: E402

_KINDS = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

failed = []
for folder, target in zip(files[::2], files[1::2], strict=True):
    fields = ModelBase.load_hparams(Path(folder), False)
    try:
        model_class = get_model_class(get_model_architecture(fields, ModelType.TEXT))
        with torch.inference_mode():
            model = model_class(Path(folder), _KINDS[kind], Path(target))
            for its in {model, getattr(model, "impl", model)}:
                if pre == "-":
                    its.set_vocab = lambda: None
                    its.write_vocab = lambda: None
                else:
                    its.set_vocab = its._set_vocab_gpt2
                    its.get_vocab_base_pre = lambda tokenizer: pre
            model.write()
    except Exception as error:
        failed.append(f"{folder}: {type(error).__name__}: {error}")
if failed:
    sys.exit("\n".join(failed))
