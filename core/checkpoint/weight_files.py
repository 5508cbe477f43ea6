"""The weight files of a checkpoint folder, checked by their headers alone: no tensor is read, no torch needed."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.core.checkpoint.model_config import ModelConfig, quantized
from penstock.core.checkpoint.tensors import expected_tensors, is_ignored
from penstock.core.config.options import ConfigError

_LFS_POINTER = b"version https://git-lfs"
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_OF_QUANTIZED = (".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".absmax", ".weight_scale", ".weight_scale_inv")
"""How the tensors end that formats of fewer bits bring along."""


class LoadError(ConfigError):
    """A checkpoint's weights cannot be loaded; the message is one clear sentence."""


class StoredTensor(NamedTuple):
    """Where a tensor is, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the format has it: "BF16"


def stored_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """All tensors of the folder's weight files, which are those that `config` asks for.

    Raises:
        LoadError: if files or tensors are missing, damaged, unexpected, quantized or of other shapes.
    """
    where: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        where |= _header(path)
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in where]
    unexpected = [name for name in where if name not in expected and not is_ignored(name, config)]
    if missing or unexpected:
        _explain(where)
    if missing:
        raise LoadError(f"the checkpoint lacks {_some(missing)}")
    if unexpected:
        raise LoadError(f"the checkpoint has tensors that {config.architecture} does not: {_some(unexpected)}")
    for name, shape in expected.items():
        found = where[name]
        if found.shape != shape:
            raise LoadError(f"tensor {name} has shape {list(found.shape)}, and config.json asks for {list(shape)}")
        if found.dtype not in _FLOATS:
            raise LoadError(f"tensor {name} has dtype {found.dtype}: quantized weights are not supported yet")
    return where


def refuse_pointer(path: Path) -> None:
    """Make sure that a file is what it is called, and not what git has in the place of a large one.

    Raises:
        LoadError: it is such a pointer.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise LoadError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if begin == _LFS_POINTER:
        raise LoadError(
            f"{str(path)!r} is a Git LFS pointer, not the file itself: `git lfs pull` in its folder fetches it, "
            "and so does `hf download`"
        )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        refuse_pointer(index)
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise LoadError(f"{str(index)!r} is no index of weight files") from None
        files = [folder / Path(name).name for name in sorted(names)]
    elif (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise LoadError(f"weight files named by the index are missing: {_some(absent)}; is the download complete?")
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise LoadError(
            f"{str(folder)!r} has only pickled weights (.bin), which can run code when read; "
            "convert them to safetensors"
        )
    if any(folder.glob("*.gguf")):
        raise LoadError(f"{str(folder)!r} has only GGUF weights, which are not supported yet; safetensors are served")
    raise LoadError(f"{str(folder)!r} has no .safetensors files; is the download complete?")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _header(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open  # not for those who only ask for help

    refuse_pointer(path)
    try:
        file: Any
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: StoredTensor(path, tuple(found.get_shape()), found.get_dtype()) for name, found in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{str(path)!r} is no readable safetensors file: {error}") from None


def _explain(names: dict[str, StoredTensor]) -> None:
    """Say what the checkpoint is, where its tensors tell."""
    if found := next((name for name in names if name.endswith(_OF_QUANTIZED)), None):
        raise LoadError(str(quantized(f"it has {found}")))
    if any(name.startswith(("language_model.", "model.language_model.", "vision_tower.", "visual.")) for name in names):
        raise LoadError(
            "these are the weights of a model that takes images or sound (language_model., vision_tower., ...); "
            "models of text alone are served"
        )
    if any(".lora_A." in name or ".lora_B." in name for name in names):
        raise LoadError(
            "these are the weights of a LoRA adapter, which is not supported yet: merge it into its model "
            "(PEFT: merge_and_unload) and serve the result"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
