"""Downloads a checkpoint from the Hugging Face hub into the local cache, with the `huggingface_hub` library.

config.json comes first, then the other small files, then the weights, so that a model that cannot be served is refused
before gigabytes are fetched. Only files that are read are fetched: no pickles, no Python code. If a download is
interrupted, complete files are kept, and the next download fetches the rest.
"""

import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import structlog

from penstock.config.options import ConfigError, ModelImpl
from penstock.config.sizes import size
from penstock.models.check import check_checkpoint
from penstock.models.families.registry import parse_model_config
from penstock.models.files.folder import ADAPTER_CONFIG, WEIGHT_INDEX, HuggingFaceFolder, no_config, weight_files
from penstock.models.gguf.checkpoint import GGUFCheckpoint
from penstock.models.gguf.choice import chosen_file, has_only_gguf
from penstock.models.gguf.container import part_names

log = structlog.get_logger()

T = TypeVar("T")

_DEFAULT_ENDPOINT = "https://huggingface.co"
_SMALL = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", WEIGHT_INDEX,
    "tokenizer*.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "modules.json", "1_Pooling/config.json",
    "tokenizer.model", "tekken.json", "*.tiktoken", "vocab.json",
)  # fmt: skip
"""All files but the weights. The last line's files are not used; they explain why there is no tokenizer.json."""

_ANSWER_SECONDS = 5.0
"""Timeout of a request for metadata. It does not bound the lookup of the host's address: see `_within`."""
_LOG_SECONDS = 5.0
_WORTH_TELLING = 1 << 20  # bytes
_END_SECONDS = 5.0
"""How long transfers get to notice that the download is over, and to tidy up."""
_AT_ONCE = 4
_SPARE_BYTES = 1 << 28
"""Disk space to leave free for other writers."""


def download(
    name: str,
    revision: str,
    cache: Path,
    endpoint: str = "",
    impl: ModelImpl = "auto",
    *,
    with_weights: bool = True,
    with_tokenizer: bool = True,
) -> Path:
    """Fetch files that are not in the cache yet; return the snapshot's folder, or the GGUF file in it.

    A GGUF file can be checked only once it is there. `name` may end with the choice of a file, such as ":Q4_K_M".

    Raises:
        ConfigError: it cannot be downloaded or served, or the disk is too small; one sentence.
    """
    name, _, choice = name.partition(":")
    with _repository(name, revision, cache, endpoint) as (repository, sizes):
        folder, shown = repository.folder, repository.shown
        if choice or has_only_gguf(sizes):
            file = chosen_file(name, sizes, choice)
            repository.fetch({part: sizes[part] for part in part_names(file)})
            check_checkpoint(GGUFCheckpoint(folder / file, folder / file), impl, with_tokenizer=with_tokenizer)
            repository.remember(revision)
            return folder / file
        if "config.json" not in sizes:
            raise ConfigError(str(no_config(shown, sizes)))
        repository.fetch({"config.json": sizes["config.json"]})
        parse_model_config(HuggingFaceFolder(folder).config, impl)
        small = [file for file in sizes if any(fnmatch(file, pattern) for pattern in _SMALL)]
        repository.fetch({file: sizes[file] for file in small})
        check_checkpoint(HuggingFaceFolder(folder), impl, with_weights=False, with_tokenizer=with_tokenizer)
        if with_weights:
            weights = weight_files(shown, sizes, folder / WEIGHT_INDEX)
            repository.fetch({file: sizes[file] for file in weights})
        repository.remember(revision)
    return folder


def download_adapter(name: str, revision: str, cache: Path, endpoint: str = "") -> Path:
    """Fetch an adapter's files that are not in the cache yet; return the snapshot's folder, or the GGUF file in it.

    Raises:
        ConfigError: there is none of that name, or it cannot be downloaded, or the disk is too small; one sentence.
    """
    name, _, choice = name.partition(":")
    with _repository(name, revision, cache, endpoint) as (repository, sizes):
        found = repository.folder
        if choice or has_only_gguf(sizes):
            file = chosen_file(name, sizes, choice)
            repository.fetch({file: sizes[file]})
            found /= file
        elif ADAPTER_CONFIG not in sizes:
            raise ConfigError(f"{repository.shown!r} is no adapter: it has no {ADAPTER_CONFIG}")
        else:
            wanted = (*_SMALL, ADAPTER_CONFIG, "adapter_model*.safetensors")
            repository.fetch({it: size for it, size in sizes.items() if any(fnmatch(it, each) for each in wanted)})
        repository.remember(revision)
    return found


@contextmanager
def _repository(name: str, revision: str, cache: Path, endpoint: str) -> Iterator[tuple["_Repository", dict[str, int]]]:
    """A repository as it is now, and its files with their sizes in bytes; errors in the block are explained."""
    endpoint = endpoint.rstrip("/") or _DEFAULT_ENDPOINT
    shown = f"{name}@{revision}" if revision else name
    with _explained(shown, endpoint), _quiet_library():
        from huggingface_hub import HfApi  # imported here only: it takes half a second

        hub = HfApi(endpoint=endpoint, library_name="penstock")
        info = _within(
            2 * _ANSWER_SECONDS,
            lambda: hub.model_info(name, revision=revision or None, files_metadata=True, timeout=_ANSWER_SECONDS),
        )
        commit = info.sha or ""
        files = [file for file in info.siblings or () if "/" not in file.rfilename or file.rfilename in _SMALL]
        sizes = {file.rfilename: file.size or 0 for file in files}
        folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
        yield _Repository(name, shown, commit, cache, endpoint, folder), sizes


class _Repository:
    """One commit of a repository, and its place in the cache."""

    def __init__(self, name: str, shown: str, commit: str, cache: Path, endpoint: str, folder: Path) -> None:
        self.shown = shown
        self.folder = folder
        self._commit = commit
        self._where: dict[str, Any] = {"repo_id": name, "revision": commit, "cache_dir": cache, "endpoint": endpoint}

    def fetch(self, sizes: dict[str, int]) -> None:
        """Fetch those of the named files that are not there yet; sizes in bytes."""
        absent = {file: count for file, count in sizes.items() if not (self.folder / file).is_file()}
        if not absent:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(absent.values()), shutil.disk_usage(self.folder.parent).free
        if needed + _SPARE_BYTES > free:
            raise OSError(errno.ENOSPC, f"{size(needed)} to download, {size(free)} free")
        pool = ThreadPoolExecutor(_AT_ONCE)
        with _Progress(self.shown, needed) as progress:
            fetched = [pool.submit(self._fetch_file, file, progress) for file in absent]
            try:
                for future in as_completed(fetched):  # the first failure ends all
                    future.result()
            except BaseException:
                progress.is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                wait(fetched, _END_SECONDS)
                raise
        pool.shutdown()

    def remember(self, revision: str) -> None:
        """Note which commit the revision is, for those who look for it in the cache."""
        _remember(self.folder.parents[1] / "refs" / (revision or "main"), self._commit)

    def _fetch_file(self, file: str, progress: "_Progress") -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(filename=file, etag_timeout=_ANSWER_SECONDS, tqdm_class=progress.bar(), **self._where)


class _Progress:
    """Shows the progress of the download: a bar on a terminal, otherwise a log line every few seconds."""

    def __init__(self, shown: str, num_bytes: int) -> None:
        self._shown, self._num_bytes = shown, num_bytes
        self._num_come = 0
        self._lock = threading.Lock()
        self._context = copy_context()  # the fields of this thread's log lines
        self._stack = ExitStack()
        self._advance: Callable[[float], None] = self._log
        self._logged = self._began = time.monotonic()
        self.is_stopped = False

    def __enter__(self) -> "_Progress":
        if self._num_bytes < _WORTH_TELLING:
            return self
        if not sys.stderr.isatty():
            log.info("downloading", model=self._shown, of=size(self._num_bytes))
        else:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            bar = self._stack.enter_context(Progress("{task.description}", *columns, console=Console(stderr=True)))
            task = bar.add_task(f"downloading {self._shown}", total=self._num_bytes)
            self._advance = lambda count: bar.advance(task, count)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _log(self, count: float) -> None:
        now = time.monotonic()
        if now - self._logged < _LOG_SECONDS:
            return
        self._logged = now
        rate = size(self._num_come / (now - self._began))
        come, of = size(self._num_come), size(self._num_bytes)
        self._context.run(log.info, "downloading", model=self._shown, received=come, of=of, per_second=rate)

    def _add(self, count: float) -> None:
        if self.is_stopped:
            raise InterruptedError("another file's download has failed")
        with self._lock:
            self._num_come += int(count)
            self._advance(count)

    def bar(self) -> Any:
        """A class that the library uses as tqdm: one instance per file, updated with received bytes."""
        add = self._add

        class Bar:
            n, total = 0, None

            def __init__(self, *_: object, **__: object) -> None:
                pass

            def __enter__(self) -> "Bar":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, count: float | None = 1) -> None:
                add(count or 0)

            def update_transfer(self, count: float | None = 1) -> None:
                """Ignore bytes on the network, which may differ from the file's."""

            def __getattr__(self, name: str) -> Callable[..., None]:
                return lambda *_, **__: None

        return Bar


@contextmanager
def _explained(shown: str, endpoint: str) -> Iterator[None]:
    """Turn errors into one sentence that says what went wrong, and what to do."""
    name, _, revision = shown.partition("@")
    elsewhere = (
        f"`hf download {name}{f' --revision {revision}' if revision else ''}` does it elsewhere, "
        "with `--local-dir FOLDER` into a folder that can be served"
    )
    try:
        yield
    except ConfigError as error:  # not a problem of the download
        said = str(error)
        raise ConfigError(said if shown in said else f"{shown}: {said}") from None
    except ImportError:
        raise ConfigError(
            f"{shown} is not (fully) on this machine, and huggingface_hub is not installed; {elsewhere}"
        ) from None
    except Exception as error:  # of the library, its transport (which differs by version) and the system
        raise ConfigError(f"{_reason(error, shown, endpoint)}; {elsewhere}") from None


def _reason(error: Exception, shown: str, endpoint: str) -> str:
    from huggingface_hub import errors

    page = f"{endpoint}/{shown.partition('@')[0]}"
    if isinstance(error, errors.GatedRepoError):
        return f"{shown} is gated: accept its terms at {page}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{shown} is not there: the repository has no such branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no folder {shown!r} here, and no repository {page} (HF_TOKEN opens private ones)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    response = getattr(error, "response", None)
    if response is not None:
        return f"{endpoint} answers with status {response.status_code} to the request for {shown}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"not enough disk space for {shown} ({error.strerror}); HF_HOME sets another place"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{shown} cannot be written to the cache: {error.strerror} ({error.filename}); HF_HOME sets another place"
        )
    what = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
    return f"{shown} is not (fully) on this machine, and the download from {endpoint} fails ({what})"


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Hide the library's warnings: this module reports errors in one sentence."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Call `ask`, and wait at most this long.

    Raises:
        TimeoutError: it took longer.
    """
    answers: list[T | Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)  # not joined at exit
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _remember(ref: Path, commit: str) -> None:
    """Record in the cache that a branch or tag means this commit."""
    if ref.name == commit:
        return
    with suppress(OSError):  # the next start asks the hub again
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}.new")
        new.write_text(commit)
        new.replace(ref)
