"""Resolves MODEL: a path, or the name of a checkpoint on the Hugging Face hub, ORG/NAME or ORG/NAME@REVISION.

ORG/NAME:Q4_K_M chooses one of several GGUF files.

A name is looked up in the hub's local cache, and what is missing there is downloaded.

    CACHE/models--org--name/refs/main              names the snapshot
    CACHE/models--org--name/snapshots/<revision>/  is the checkpoint folder
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.config.groups.model import ModelOptions
from penstock.config.options import Config, ConfigError
from penstock.models.files.folder import ADAPTER_CONFIG, HuggingFaceFolder
from penstock.models.files.source import Incomplete
from penstock.models.finding.hub import download, download_adapter
from penstock.models.gguf.choice import chosen_file, has_only_gguf
from penstock.models.gguf.container import part_paths
from penstock.models.part import Finders, locate_further

_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<choice>[\w.-]+))?(@(?P<revision>[\w.-]+(/[\w.-]+)*))?"
)
_LEAST_DIGITS = 7  # of a commit
_ON = {"1", "on", "yes", "true"}  # values that the library takes as true


def located(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    *,
    with_weights: bool = True,
    with_tokenizer: bool = True,
    before_download: Callable[[], None] = lambda: None,
) -> Config:
    """Replace MODEL, and parts' checkpoints, by the path that it means; it is served under the name that was given.

    Done once, before any process starts, because all processes must read the same files, whatever is downloaded
    meanwhile. Only needed files are downloaded, with progress on a terminal or in the log, which `before_download` may
    set up.

    Raises:
        ConfigError: there is no such checkpoint, or it cannot be downloaded; the message says what to do.
    """

    def find_adapter(given: str) -> str:
        return str(located_adapter(given, environment, before_download))

    def find_checkpoint(name: str) -> str:
        its = Config(model=ModelOptions(model=name))
        return located(
            its, environment, with_weights=with_weights, with_tokenizer=with_tokenizer, before_download=before_download
        ).model.model

    config = locate_further(config, Finders(find_checkpoint, find_adapter))
    given = config.model.model
    if not given:
        return config
    folder, name, revision = find_local(given, environment)
    if name and Path(given).name != f"models--{name.replace('/', '--')}":
        lacks = _lacks(folder, with_weights, with_tokenizer) if folder is not None else ""
        if (folder is None or lacks) and not _is_offline(environment) and "/" in name:
            before_download()
            try:
                folder = download(
                    name, revision, hub_cache(environment), environment.get("HF_ENDPOINT", ""), config.model.model_impl,
                    with_weights=with_weights, with_tokenizer=with_tokenizer,
                )  # fmt: skip
            except ConfigError as error:
                raise ConfigError(f"{lacks}; {error}" if lacks else str(error)) from None
    if folder is None:
        if "/" not in name:
            raise ConfigError(
                f"there is no folder or file {given!r} here, and models of the Hugging Face hub have names of two "
                "parts, such as Qwen/Qwen3-0.6B"
            )
        raise ConfigError(
            f"no checkpoint folder at {given!r}, and no download of that name in {str(hub_cache(environment))!r}; "
            f"`{_hf_download(name, revision)}` fetches it" + (" (HF_HUB_OFFLINE is set)" * _is_offline(environment))
        )
    names = config.model.served_model_name or ((name,) if name else ())
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=str(folder), served_model_name=names)
    )


def located_adapter(
    given: str, environment: Mapping[str, str] = os.environ, before_download: Callable[[], None] = lambda: None
) -> Path:
    """The folder or GGUF file of an adapter: a path, or a name of the hub, which is downloaded if it is missing.

    Raises:
        ConfigError: there is no such adapter, or it cannot be downloaded.
    """
    found, name, revision = find_local(given, environment)
    if found is not None and found.is_dir():
        needed = (ADAPTER_CONFIG, "adapter_model.safetensors")
        absent = next((each for each in needed if not (found / each).is_file()), "")
        if absent and not name:
            raise ConfigError(f"{given!r} holds no adapter: it has no {absent}")
        found = None if absent else found  # a download may be a part of it
    if found is None and "/" in name and not _is_offline(environment):
        before_download()
        found = download_adapter(name, revision, hub_cache(environment), environment.get("HF_ENDPOINT", ""))
    if found is None:
        raise ConfigError(
            f"there is no adapter at {given!r}, and no download of that name in {str(hub_cache(environment))!r}"
            + (" (HF_HUB_OFFLINE is set)" * _is_offline(environment))
        )
    return found


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the hub's local cache, from the same variables that the `hf` command reads."""
    for name, rest in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environment.get(name):
            return Path(environment[name]).expanduser() / rest
    home = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "huggingface" / "hub"


def find_local(given: str, environment: Mapping[str, str] = os.environ) -> tuple[Path | None, str, str]:
    """Return the path (None: not on this machine), the name to serve it under unless that is the path, the revision.

    The name includes the choice of a file, if one was given.

    Raises:
        ConfigError: it is neither a path nor a valid name, or several snapshots match.
    """
    path = Path(given).expanduser()
    if _is_folder(path) and _is_there(path / "snapshots") and not _is_there(path / "config.json"):
        return _snapshot(path), hub_name(path.resolve()), ""
    if _is_there(path):
        return path, "" if path == Path(given) else given, ""
    found = _HUB_NAME.fullmatch(given)
    if found is None or ".." in given:
        raise ConfigError(f"no checkpoint folder at {given!r}")
    name, choice, revision = found["name"], found["choice"] or "", found["revision"] or ""
    shown = f"{name}:{choice}" if choice else name
    cached = hub_cache(environment) / f"models--{name.replace('/', '--')}"
    if not _is_there(cached / "snapshots"):
        return None, shown, revision
    if revision:
        return _of_choice(_of_revision(cached, revision), name, choice), shown, revision
    has_any = any((cached / "snapshots").iterdir())
    snapshot = _snapshot(cached) if has_any or _is_offline(environment) else None
    return _of_choice(snapshot, name, choice), shown, ""


def hub_name(cached: Path) -> str:
    """Return ORG/NAME of a folder in the cache."""
    return cached.name.removeprefix("models--").replace("--", "/")


def _of_choice(folder: Path | None, name: str, choice: str) -> Path | None:
    """Return the chosen file of a snapshot with GGUF files, else the folder; None if the chosen file is missing."""
    if folder is None:
        return None
    names = [path.name for path in folder.iterdir()]
    if not choice and not has_only_gguf(names):
        return folder
    try:
        return folder / chosen_file(name, names, choice)
    except ConfigError:
        return None


def _lacks(folder: Path, with_weights: bool, with_tokenizer: bool) -> str:
    """Return what an unfinished download lacks; empty if nothing. Other faults are not checked."""
    checkpoint = HuggingFaceFolder(folder)
    try:
        if folder.suffix == ".gguf":
            part_paths(folder)
            return ""
        _ = checkpoint.config
        if with_tokenizer:
            checkpoint.tokenizer()
        if with_weights:
            checkpoint.weight_files()
    except Incomplete as error:
        return str(error)
    except ConfigError:
        pass
    return ""


def _is_offline(environment: Mapping[str, str]) -> bool:
    said = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return said.lower() in _ON


def _hf_download(name: str, revision: str) -> str:
    name, _, choice = name.partition(":")
    only = f" --include '*{choice}*'" if choice else ""
    return f"hf download {name}{only}" + (f" --revision {revision}" if revision else "")


def _is_folder(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False


def _is_there(path: Path) -> bool:
    """Return whether the file or folder exists; False for invalid names (too long, or with a zero byte)."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _of_revision(cached: Path, revision: str) -> Path | None:
    """Return the snapshot of a branch, tag or commit, if it is in the cache."""
    with suppress(OSError, UnicodeDecodeError):
        commit = (cached / "refs" / revision).read_text().strip()
        if commit and "/" not in commit and (cached / "snapshots" / commit).is_dir():
            return cached / "snapshots" / commit
    found = [path for path in (cached / "snapshots").iterdir() if path.is_dir() and path.name.startswith(revision)]
    return found[0] if len(found) == 1 and len(revision) >= _LEAST_DIGITS else None


def _snapshot(cached: Path) -> Path:
    """Return the checkpoint folder in a model's folder of the cache.

    Raises:
        ConfigError: there is none, or it is ambiguous.
    """
    if main := _of_revision(cached, "main"):
        return main
    found = sorted(path for path in (cached / "snapshots").iterdir() if path.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"{str(cached)!r} contains no snapshot; `hf download {hub_name(cached)}` completes it")
    raise ConfigError(f"{str(cached)!r} has {len(found)} snapshots and no refs/main; give the folder of one of them")
