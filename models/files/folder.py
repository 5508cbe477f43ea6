"""A checkpoint as Hugging Face publishes it: a folder of JSON files and safetensors."""

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache, cached_property, partial
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.config.options import ConfigError
from penstock.models.files.source import Incomplete, LoadError, StoredTensor

WEIGHT_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"
_OLD_QUANTIZED = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "*.tiktoken", "vocab.json")
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")

# file that shows another kind of folder -> message
_OTHER_FOLDERS = {
    ADAPTER_CONFIG: "it holds a LoRA adapter, which is served beside its model: penstock serve MODEL --lora NAME=PATH",
    "model_index.json": "it holds a pipeline of the diffusers library; only models that generate text are served",
    "params.json": "it holds a model in its maker's own format; serve the one with a config.json",
}


class HuggingFaceFolder:
    """See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """Accept any folder: a missing file is reported by the property that needs it."""
        return cls(path) if path.is_dir() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, with the quantization file that older checkpoints have beside it."""
        path, names = self.path / "config.json", self._names()
        if path.name not in names:
            self._refuse_broken_link(path.name)
            raise no_config(str(self.path), names)
        _refuse_pointer(path)
        for name, method in _OLD_QUANTIZED.items():
            if name in names:
                said = {"quant_method": method, "said_by": name} | _read_json(self.path / name)
                return {"quantization_config": said} | _read_json(path)
        return _read_json(path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json."""
        return _read_json(self.path / "generation_config.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json; special tokens missing there are taken from special_tokens_map.json."""
        named = _read_json(self.path / "tokenizer_config.json")
        said = {name for name, value in named.items() if value is not None}
        absent = {*_TOKEN_LISTS} if said & {*_TOKEN_LISTS} else set()
        older = _read_json(self.path / "special_tokens_map.json")
        return named | {name: value for name, value in older.items() if name not in said | absent}

    @cached_property
    def processor_config(self) -> dict[str, Any]:
        """processor_config.json; an image processor missing there is taken from preprocessor_config.json."""
        said = _read_json(self.path / "processor_config.json")
        if not isinstance(said.get("image_processor"), dict) and (
            image := _read_json(self.path / "preprocessor_config.json")
        ):
            named = {name: image[name] for name in ("processor_class",) if name in image}
            said = named | said | {"image_processor": image}
        return said

    def tokenizer(self) -> bytes:
        """tokenizer.json."""
        path = self.path / "tokenizer.json"
        if path.name in self._names():
            _refuse_pointer(path)
            return path.read_bytes()
        self._refuse_broken_link(path.name)
        other = next((found.name for name in _OTHER_TOKENIZERS for found in sorted(self.path.glob(name))), None)
        if other is None:
            raise Incomplete(
                f"{str(self.path)!r} has no tokenizer.json, which a checkpoint needs to be served; "
                "is the download complete?"
            )
        raise ConfigError(
            f"{str(self.path)!r} has {other} and no tokenizer.json, which alone is read: transformers can write one "
            "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder)) if tokenizer_config.json is there too; "
            "else take it from the model's page"
        )

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the template in tokenizer_config.json or chat_template.json."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return read_text(path, "the chat template")
        found = self.tokenizer_config.get("chat_template")
        if found is None:
            found = _read_json(self.path / "chat_template.json").get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, dict):
            found = found.get("default")
            if found is None:
                raise ConfigError("the checkpoint has several chat templates and none is called 'default'")
        if found is not None and not isinstance(found, str):
            raise ConfigError("tokenizer_config.json: chat_template is neither a text nor a list of named ones")
        return found

    def embedding_modules(self) -> list[tuple[str, dict[str, Any]]]:
        """modules.json, and the config.json of each module's folder; sentence_bert_config.json for the Transformer."""
        found = []
        for module in self._modules():
            name = module.type.rpartition(".")[2]
            files = [*_TRANSFORMER_FILES] if name == "Transformer" else ["config.json"] if module.path else []
            settings = (_read_json(self.path / module.path / file) for file in files)
            found.append((name, next(filter(None, settings), {})))
        return found

    def module_tensors(self, number: int) -> dict[str, StoredTensor]:
        """The tensors of a module's model.safetensors."""
        path = self.path / self._modules()[number].path / "model.safetensors"
        if not path.is_file():
            raise LoadError(
                f"{str(path)!r} is not there, and pickled weights (.bin), which can run code, are not read: "
                "sentence-transformers writes the file (SentenceTransformer(folder).save(folder))"
            )
        return _tensors_of(path)

    @property
    def embedding_config(self) -> dict[str, Any]:
        """config_sentence_transformers.json."""
        return _read_json(self.path / "config_sentence_transformers.json")

    def _modules(self) -> "list[_Module]":
        path = self.path / "modules.json"
        if not path.is_file():
            return []
        try:
            modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{str(path)!r} is not a list of sentence-transformers' modules: {error}") from None
        for module in modules:
            folder = Path(module.path)
            if folder.is_absolute() or ".." in folder.parts:
                raise ConfigError(f"{str(path)!r}: the module's path {module.path[:64]!r} leaves the checkpoint")
        return modules

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of all weight files. A file is mapped into memory when its first tensor is read."""
        found: dict[str, StoredTensor] = {}
        files: dict[str, str] = {}
        for file in self.weight_files():
            tensors = _tensors_of(self.path / file)
            if twice := next((name for name in tensors if name in found), None):
                raise LoadError(
                    f"{str(self.path)!r} has the tensor {twice} in both {files[twice]} and {file}: "
                    "remove the weights that do not belong there"
                )
            found |= tensors
            files |= dict.fromkeys(tensors, file)
        index = self.path / WEIGHT_INDEX
        for name, file in _weight_map(index).items() if index.is_file() else ():
            if files.get(name, file) != Path(file).name:
                raise LoadError(
                    f"{str(index)!r} does not fit the weights: it says that {name} is in {file}, but it is in "
                    f"{files[name]}; download all of them again"
                )
        return found

    def weight_files(self) -> list[str]:
        """The names of the weight files; see the function of this name."""
        self._refuse_broken_link("*.safetensors*")
        return weight_files(str(self.path), self._names(), self.path / WEIGHT_INDEX)

    def _names(self) -> set[str]:
        """The names of the files.

        Raises:
            ConfigError: the folder cannot be read.
        """
        try:
            return {path.name for path in self.path.iterdir() if path.is_file()}
        except OSError as error:
            raise ConfigError(f"cannot read {str(self.path)!r}: {error.strerror}") from None

    def _refuse_broken_link(self, pattern: str) -> None:
        """Refuse a link in the hub's cache whose blob is missing."""
        for path in sorted(self.path.iterdir()):
            if fnmatch(path.name, pattern) and path.is_symlink() and not path.exists():
                raise Incomplete(
                    f"{str(self.path)!r} lacks what {path.name} is a link to: the download is not complete, "
                    "or its blobs were not copied along"
                )


def no_config(where: str, names: Collection[str]) -> ConfigError:
    """Return the error for a place with these files but no config.json."""
    said = next((said for kind, said in _OTHER_FOLDERS.items() if any(fnmatch(name, kind) for name in names)), "")
    if said:
        return ConfigError(f"{where!r} is not a checkpoint folder: {said}")
    lacks = "it has no config.json" if names else "it is empty"
    return Incomplete(
        f"{where!r} is not a checkpoint folder: {lacks}; name one that holds config.json, tokenizer.json and the "
        "weights, such as `hf download NAME --local-dir FOLDER` makes"
    )


def weight_files(where: str, names: Collection[str], index: Path) -> list[str]:
    """Return which of the files at a place hold the weights. `index` is read if `names` has it.

    Raises:
        Incomplete: some or all are missing.
        LoadError: the weights are in another format, or the index is damaged.
    """
    if WEIGHT_INDEX in names:
        files = sorted({Path(name).name for name in _weight_map(index).values()})
    elif "model.safetensors" in names:
        return ["model.safetensors"]
    else:
        files = sorted(name for name in names if name.endswith(".safetensors"))
    absent = [name for name in files if name not in names]
    if absent:
        shown = ", ".join(absent[:3])
        raise Incomplete(f"weight files named by the index are missing: {shown}; is the download complete?")
    if files:
        return files
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise LoadError(
            f"{where!r} has only pickled weights (.bin), which can run code when read; convert them to safetensors"
        )
    raise Incomplete(f"{where!r} has no .safetensors files; is the download complete?")


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index."""
    _refuse_pointer(index)
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LoadError(f"{str(index)!r} is not an index of weight files; download it again") from None


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file.

    Raises:
        ConfigError: naming the file, and `what` it should be.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one."""
    try:
        if not path.is_file():
            return {}
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if (found := _with_infinities(content)) is not None:
            return found
        why = str(error) if content.strip() else "it is empty; download it again"
        raise ConfigError(f"{str(path)!r} is not a JSON object: {why}") from None


def _with_infinities(content: bytes) -> dict[str, Any] | None:
    """Read an object with numbers that only Python's JSON has; None if that is not what is wrong with it.

    Older versions of transformers wrote `Infinity`, into time_step_limit of Mamba 2 for one. It becomes that word,
    which is refused where a number must be finite.
    """
    with suppress(ValueError, RecursionError):
        found = json.loads(content, parse_constant=str)
        return found if isinstance(found, dict) else None
    return None


def _refuse_pointer(path: Path) -> None:
    """Refuse a file that is only a Git LFS pointer."""
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


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file: 8 bytes with the header's length, the header (JSON), and the data.

    The library validates sizes, gaps, overlaps and dtypes; after that the header can be trusted.
    """
    from safetensors import SafetensorError, safe_open  # slow to import, and not needed for --help

    _refuse_pointer(path)
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(begin - 8), type=dict[str, dict[str, Any]])
    except (SafetensorError, OSError, msgspec.MsgspecError) as error:
        raise LoadError(f"{str(path)!r} is not a readable safetensors file: {_damage(path) or error}") from None
    header.pop("__metadata__", None)
    mapped = cache(partial(_mapped, path))
    return {name: _stored(entry, begin, mapped) for name, entry in header.items()}


def _damage(path: Path) -> str:
    """Return what is wrong with the length or header of a safetensors file; empty if neither is wrong."""
    try:
        with path.open("rb") as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                said = f"and its header should have {length}" if size >= 8 else "too few for any"
                return f"it has {size} bytes, {said}; download it again"
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except OSError as error:
        return error.strerror or str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return "its header is damaged; download it again"
    return f"it should have {wanted} bytes and has {size}; download it again" if wanted != size else ""


def _stored(entry: dict[str, Any], begin: int, mapped: Callable[[], memoryview]) -> StoredTensor:
    first, last = (begin + offset for offset in entry["data_offsets"])

    def read() -> memoryview:
        return mapped()[first:last]

    return StoredTensor(tuple(entry["shape"]), entry["dtype"], last - first, read)


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:  # a private mapping: torch requires writable memory
            return memoryview(mmap(file.fileno(), 0, access=ACCESS_COPY))
    except (OSError, ValueError) as error:  # the file has changed since its header was read
        raise LoadError(f"{str(path)!r} is not a readable safetensors file: {error}") from None
