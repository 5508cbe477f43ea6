"""`penstock models`: the checkpoints on this machine, and what each needs. Reads JSON files and headers of weights."""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from penstock.config import Config, ConfigError, LogOptions, ModelOptions
from penstock.config.parser import Parser
from penstock.config.sizes import size
from penstock.frontend.parsing.reasoning import reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import tool_format_of
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.tokenizer import special_tokens_of
from penstock.ipc.logs import flush_logs, setup_logging
from penstock.ipc.process import EXIT_CONFIG
from penstock.models.check import check_checkpoint
from penstock.models.families.registry import expected_tensors, parse_model_config
from penstock.models.files.source import Checkpoint, Incomplete
from penstock.models.finding.located import find_local, hub_cache, hub_name, located
from penstock.models.finding.registry import model_path, open_checkpoint
from penstock.models.gguf.block_types import BLOCK_TYPES
from penstock.models.gguf.choice import chosen_file, has_only_gguf
from penstock.models.gguf.container import gguf_models, part_paths
from penstock.models.kv_formats import kv_format_of
from penstock.models.parsing.by_transformers import TransformersConfig

_KV_TOKENS = 1024
_MAX_PHRASE = 60
_CONFIG = "config.json"
_DEPTH = 2
"""Levels of folders below the one that is listed: model managers keep FOLDER/ORG/NAME/model.gguf."""
_FOLDERS = re.compile(r"'[^']*/([^'/]*)'")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEADERS = ("name", "architecture", "params", "type", "on disk", "memory", "served by", "chat")
_TO_THE_RIGHT = {"params", "on disk", "memory"}


class PageGroup(msgspec.Struct):
    """Layers that keep the same of a token, for the same time."""

    num_layers: int
    window: int | None  # the last tokens that they keep; None: all
    bytes_per_token: int  # of all these layers together


class Chat(msgspec.Struct):
    """What the chat template teaches."""

    tools: str | None  # the names that `--tool-call-parser` and `--reasoning-parser` know them by
    reasoning: str | None


class Model(msgspec.Struct, kw_only=True):
    """What is known of one checkpoint; None: it does not say, or cannot be read."""

    name: str
    path: str
    revision: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    dtype: str | None = None  # torch's name of most weights' type, else safetensors' name
    bytes_on_disk: int = 0
    max_model_len: int | None = None
    weight_bytes: int | None = None
    page_groups: tuple[PageGroup, ...] = ()
    memory_bytes: int | None = None  # the weights, and the KV of 1,024 tokens
    chat: Chat | None = None  # None: it is not for chats
    served_by: str | None = None  # "own code", "transformers"; None: it cannot be served
    reason: str | None = None  # why not

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a token that all layers keep."""
        return sum(group.bytes_per_token for group in self.page_groups)


def main(argv: Sequence[str] | None = None, prog: str = "penstock models") -> int:
    """List all checkpoints, or describe one; return the exit code (2: there is no such checkpoint).

    Args:
        argv: the command's arguments.
        prog: the command that the user has typed.
    """
    parser = Parser(
        prog,
        "List the models that are here: the demo model, those in the local cache of the Hugging Face hub, GGUF files "
        "in llama.cpp's cache and in the current folder; or those in FOLDER. Tells parameters, size, and the memory "
        f"for the weights and the KV of {_KV_TOKENS:,} tokens, in the type that is stored.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL|FOLDER",
        help="tell about this one alone: checkpoint folder, GGUF file, or ORG/NAME[:FILE][@REVISION]; or list the "
        "GGUF files and checkpoint folders in a folder",
    )  # fmt: skip
    parser.add_argument("--download", action="store_true", help="fetch it first, if it is not in the cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        if args.download:
            _download(args.model)
        models, is_one = _chosen(args.model)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    finally:
        flush_logs()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(models[0] if is_one else models), indent=2).decode())
    elif is_one:
        _print_one(models[0])
    elif sys.stdout.isatty():
        _print_table(models)
    else:
        _print_plain([_HEADERS, *(_row(model) for model in models)])
    return 0


def _download(model: str | None) -> None:
    if model is None:
        raise ConfigError("--download needs the name of a checkpoint: ORG/NAME")
    located(
        Config(model=ModelOptions(model=model)),
        before_download=lambda: setup_logging("penstock", LogOptions().log_level, LogOptions().log_format),
    )


def _chosen(given: str | None) -> tuple[list[Model], bool]:
    """The models to tell about, and whether one was asked for.

    Raises:
        ConfigError: there is none.
    """
    if given is None:
        return list(_all()), False
    path, name, _ = find_local(given)
    if path is None or name or not path.is_dir() or (path / _CONFIG).is_file():
        return [_one(given)], True
    found = list(_inside(path))
    if not found:
        raise ConfigError(f"{given!r} holds neither a checkpoint folder nor a GGUF file")
    return [look(each, str(each)) for each in found], False


def _inside(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """The checkpoint folders and GGUF files in a folder; of several parts, the first."""
    try:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return
    if any(path.name == _CONFIG for path in entries):
        yield folder
    yield from _gguf_files(folder)
    if depth:
        for path in entries:
            if path.is_dir():
                yield from _inside(path, depth - 1)


def _gguf_files(folder: Path) -> list[Path]:
    """The GGUF files in a folder; of several parts, the first."""
    return [folder / name for name in gguf_models([path.name for path in folder.glob("*.gguf")])]


def _llama_cache() -> Path:
    """Where llama.cpp keeps its downloads."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("LLAMA_CACHE") or home / "llama.cpp").expanduser()


def _one(given: str) -> Model:
    path, name, revision = find_local(given)
    if path is None and "/" not in given:
        raise ConfigError(f"there is no folder, file or download {given!r} here")
    if path is None:
        raise ConfigError(f"{given} is not on this machine; `penstock pull {given}` downloads it")
    open_checkpoint(path)  # raises if it is not a checkpoint
    return look(path, name or given, revision or _commit(path))


def _all() -> Iterator[Model]:
    with suppress(ConfigError):  # the demo model is not installed
        yield look(model_path(Config()), "penstock-demo")
    for cached in sorted(hub_cache().glob("models--*")):
        snapshots = sorted(path for path in (cached / "snapshots").glob("*") if path.is_dir())
        for snapshot in snapshots:
            revision = ", ".join(_refs(cached, snapshot.name)) or snapshot.name
            for path, name in _of_snapshot(snapshot, hub_name(cached)):
                yield look(path, name, revision)
        if not snapshots:
            yield Model(name=hub_name(cached), path=str(cached), reason="incomplete: nothing has been downloaded yet")
    for folder in (_llama_cache(), Path()):
        for path in _gguf_files(folder):
            yield look(path, str(path))


def _of_snapshot(snapshot: Path, name: str) -> Iterator[tuple[Path, str]]:
    """A snapshot's models: itself, or each of its GGUF files, with a name that means this one."""
    names = [path.name for path in snapshot.iterdir()]
    files = gguf_models([each for each in names if each.endswith(".gguf")])
    if len(files) < 2 or not has_only_gguf(names):
        yield snapshot, name
        return
    for file in files:
        stem = file.removesuffix(".gguf")
        for choice in (stem.rpartition("-")[2], stem):
            with suppress(ConfigError):  # several have this word
                if chosen_file(name, names, choice) == file:
                    yield snapshot / file, f"{name}:{choice}"
                    break


def _commit(path: Path) -> str | None:
    folder = path if path.is_dir() else path.parent
    return folder.name if folder.parent.name == "snapshots" else None


def _refs(cached: Path, commit: str) -> list[str]:
    """The branches and tags that point to a commit."""
    found = []
    for ref in sorted(path for path in (cached / "refs").rglob("*") if path.is_file()):
        try:
            if ref.read_text().strip() == commit:
                found.append(str(ref.relative_to(cached / "refs")))
        except (OSError, UnicodeDecodeError):
            continue
    return found


def look(path: Path, name: str, revision: str | None = None) -> Model:
    """What is known about the checkpoint at `path`. Its faults are reported in the result, not raised."""
    model = Model(name=name, path=str(path), revision=revision)
    try:
        files = part_paths(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        model.bytes_on_disk = sum(file.stat().st_size for file in files)
        _read(path, model)
    except Incomplete as error:
        model.reason = f"incomplete: {error}"
    except (ConfigError, OSError) as error:
        model.reason = str(error)
    return model


def _read(path: Path, model: Model) -> None:
    checkpoint = open_checkpoint(path)
    named = checkpoint.config.get("architectures")
    model.architecture = str(named[0]) if isinstance(named, list) and named else None
    config = None
    try:
        config = parse_model_config(checkpoint.config)
    finally:  # describe the weights, whatever the architecture
        num_bytes = _weigh(path, model)
    model.max_model_len = config.max_model_len
    if config.quantization is not None:
        model.dtype = config.quantization.name
        model.parameters = sum(math.prod(shape) for shape in (expected_tensors(config) or {}).values())
    kv_size = _BYTES.get({name: key for key, name in _TORCH_NAMES.items()}.get(config.checkpoint_dtype, ""), 2)
    if kv_format_of("auto", config) is not None:
        kv_size = 1
    model.page_groups = tuple(
        PageGroup(count, shape.window, count * kv_size * shape.num_heads * (shape.key_dim + shape.value_dim))
        for shape, count in Counter(config.kv).items()
    )
    model.chat = _chat(checkpoint)
    check_checkpoint(checkpoint)
    kept = sum(min(_KV_TOKENS, group.window or _KV_TOKENS) * group.bytes_per_token for group in model.page_groups)
    model.weight_bytes, model.memory_bytes = num_bytes, num_bytes + kept
    model.served_by = "transformers" if isinstance(config, TransformersConfig) else "own code"


def _chat(checkpoint: Checkpoint) -> Chat | None:
    source = checkpoint.chat_template()
    if source is None:
        return None
    # By its words: here it is not rendered, which may take for ever.
    tools, reasoning = tool_format_of(source).name, reasoning_format_of(source)
    takes_tools = tools != "generic" or ChatTemplate(source, special_tokens_of(checkpoint)).has_tool_variable
    return Chat(tools if takes_tools else None, None if reasoning is None else reasoning.name)


def _weigh(path: Path, model: Model) -> int:
    """Count parameters, if the weights are all there and readable; returns their bytes."""
    try:
        tensors = open_checkpoint(path).tensors().values()
    except ConfigError:
        return 0  # the check reports it
    of_types: Counter[str] = Counter()
    for tensor in tensors:
        of_types[tensor.dtype] += tensor.num_elements
    if of_types:
        most = of_types.most_common(1)[0][0]
        model.dtype = _TORCH_NAMES.get(most, most)
        tells = of_types.keys() <= _BYTES.keys() | BLOCK_TYPES.keys()  # other packed types do not tell the number
        model.parameters = of_types.total() if tells else None
    return sum(tensor.num_bytes for tensor in tensors)


def _typed(model: Model) -> str:
    """What to type on the command line for this model."""
    if model.revision is None or "main" in model.revision.split(", "):
        return model.name
    return f"{model.name}@{model.revision.split(', ')[0][:12]}"


def _row(model: Model) -> tuple[str, ...]:
    return (
        _typed(model),
        (model.architecture or "-").removesuffix("ForCausalLM"),
        "-" if model.parameters is None else _count(model.parameters),
        model.dtype or "-",
        size(model.bytes_on_disk),
        "-" if model.memory_bytes is None else size(model.memory_bytes),
        model.served_by or f"no: {_phrase(model.reason or 'unknown')}",
        _formats(model.chat),
    )


def _formats(chat: Chat | None) -> str:
    if chat is None:
        return "-"
    return ", ".join(
        f"{what}: {name}" for what, name in (("calls", chat.tools), ("reasoning", chat.reasoning)) if name
    ) or "text"  # fmt: skip


def _print_table(models: list[Model]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in _HEADERS:
        justify: JustifyMethod = "right" if header in _TO_THE_RIGHT else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=header not in ("name", "served by", "chat"))
    for model in models:
        table.add_row(*map(escape, _row(model)), style="" if model.served_by else "dim")
    Console(highlight=False).print(table)


def _print_plain(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            word.rjust(width) if header in _TO_THE_RIGHT else word.ljust(width)
            for word, width, header in zip(row, widths, _HEADERS, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_one(model: Model) -> None:
    told = [
        ("name", model.name),
        ("revision", model.revision or "-"),
        *zip(_HEADERS[1:-2], _row(model)[1:-2], strict=True),
    ]
    if model.weight_bytes is not None:
        told.append(("weights", size(model.weight_bytes)))
    for group in model.page_groups:
        of_the_last = f" of the last {group.window:,} tokens" if group.window is not None else ""
        told.append(("KV of a token", f"{size(group.bytes_per_token)} in {group.num_layers} layers{of_the_last}"))
    if model.max_model_len is not None:
        told.append(("longest sequence", f"{model.max_model_len:,} tokens"))
    told.append(("chat", _formats(model.chat)))
    told += [("served by", model.served_by or f"no: {model.reason}"), ("path", model.path)]
    for header, text in told:
        if text != "-":
            print(f"{header:<17} {text}")


def _phrase(sentence: str) -> str:
    """The beginning of a reason, short enough for a table."""
    if sentence.startswith("incomplete"):
        return "incomplete"
    phrase = _FOLDERS.sub(r"\1", sentence.split("; ")[0].split(" (")[0].split(", and ")[0])
    phrase = phrase.removeprefix("this checkpoint ").removeprefix("is ")
    return phrase if len(phrase) <= _MAX_PHRASE else phrase[: _MAX_PHRASE - 1] + "…"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


if __name__ == "__main__":
    sys.exit(main())
