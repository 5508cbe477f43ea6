"""Every option of Penstock, once: name, type, default, bounds and meaning.

The command line (`flags.py`), the messages between supervisor and children, and the reference in
the docs are all made from these structs, so they cannot drift apart.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.ipc.addresses import is_tcp
from penstock.ipc.key_file import ChannelKeys, KeyFileError, read_key_file

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
CpuKernels = Literal["auto", "native", "torch"]
ModelImpl = Literal["auto", "own", "transformers"]
LogFormat = Literal["auto", "console", "json"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the option groups."""


class ModelOptions(Options, frozen=True):
    """Which checkpoint, and under which names."""

    model: Annotated[
        str,
        Meta(description="Checkpoint folder, or ORG/NAME[@REVISION] of the Hugging Face hub. Empty: the demo model."),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="Names of the model in the API. The first one is reported.")
    ] = ()
    max_model_len: Annotated[
        int,
        Meta(
            description="Longest prompt plus output of one sequence, in tokens. 0: as long as the model and the "
            "KV pool allow.",
            ge=0,
        ),
    ] = 0
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="Code that computes the model: 'own' is Penstock's, 'transformers' that library's, which is "
            "slower but knows many more architectures. 'auto' takes its own code where it has some."
        ),
    ] = "auto"


class SchedulerOptions(Options, frozen=True):
    """How steps are filled."""

    max_num_seqs: Annotated[int, Meta(description="Most sequences in one step (rows).", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Meta(description="Most tokens computed in one step.", ge=1, le=1 << 20)] = (
        2048
    )
    max_prefill_ms: Annotated[
        int,
        Meta(
            description="Longest time for a step that computes prompts while other requests are streaming, in "
            "milliseconds: prompts are cut into smaller chunks to keep to it. 0: no limit.",
            ge=0,
        ),
    ] = 250
    page_size: Annotated[int, Meta(description="Tokens per KV page, a power of two.", ge=1, le=1024)] = 16
    pipeline_depth: Annotated[
        int, Meta(description="Steps planned ahead of the results. 0 waits for each step, 1 overlaps one.", ge=0, le=4)
    ] = 1
    enable_prefix_caching: Annotated[
        bool, Meta(description="Keep the pages of finished sequences and reuse them for equal prefixes.")
    ] = True
    scheduling_policy: Annotated[
        str,
        Meta(
            description="Order of waiting requests: 'fcfs' by arrival, 'priority' by the request's priority first, or "
            "MODULE:CLASS, a policy of your own."
        ),
    ] = "fcfs"
    max_num_queued_seqs: Annotated[
        int, Meta(description="Most sequences in the queue. Further requests are refused with status 429.", ge=1)
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            description="Most prompt tokens in the queue. Further requests are refused with status 429, unless "
            "the queue is empty.",
            ge=1,
        ),
    ] = 4 << 20
    queue_patience: Annotated[
        float,
        Meta(
            description="Longest expected wait for a row, in seconds. A request that would wait longer, at the "
            "rate at which the queue is emptying, is refused with status 429. At least as many "
            "requests as there are rows may always wait. 0: no limit.",
            ge=0.0,
        ),
    ] = 4.0
    overload_order: Annotated[
        Literal["oldest", "newest"],
        Meta(description="Which request goes first once the queue is half full: the oldest or the newest."),
    ] = "oldest"
    queue_timeout: Annotated[
        float,
        Meta(
            description="Longest wait for a first row, in seconds. After that the request fails with status 504. "
            "0: no limit.",
            ge=0.0,
        ),
    ] = 0.0
    step_trace: Annotated[str, Meta(description="Write one JSON line per step to this file. Empty: no trace.")] = ""


class WorkerOptions(Options, frozen=True):
    """The process that holds weights and KV pool."""

    device: Annotated[str, Meta(description="'auto', 'cpu', 'cuda' or 'cuda:N'.")] = "auto"
    dtype: Annotated[
        DTypeName,
        Meta(description="Type of weights and KV. 'auto' takes the checkpoint's type where the device is fast in it."),
    ] = "auto"
    load_format: Annotated[
        Literal["safetensors", "dummy"], Meta(description="'dummy' makes random weights of the right shapes.")
    ] = "safetensors"
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of the GPU's memory for weights, activations and KV pool.", gt=0.0, le=1.0)
    ] = 0.9
    cpu_kv_cache_gib: Annotated[
        float,
        Meta(
            description="Size of the KV pool on a CPU, in GiB. 0: a tenth of the free memory, but at most 4 GiB.",
            ge=0.0,
        ),
    ] = 0.0
    num_pages: Annotated[
        int, Meta(description="Size of the KV pool in pages. 0: as many as the memory allows.", ge=0)
    ] = 0
    num_threads: Annotated[
        int,
        Meta(
            description="Most threads for the CPU kernels. 0: one per core that this process may use.",
            ge=0,
        ),
    ] = 0
    spare_worker: Annotated[
        bool,
        Meta(
            description="Keep a spare process ready that has imported everything but holds no weights (about 200 "
            "MB). A lost worker is replaced by a fork of it, without delay."
        ),
    ] = True
    cpu_kernels: Annotated[
        CpuKernels,
        Meta(
            description="Kernels on a CPU: 'native' are in C++, and are compiled first if necessary (this takes "
            "seconds and a C++ compiler); 'torch' are PyTorch's own. 'auto' takes the native ones if "
            "they are compiled already, and leaves long steps in bfloat16 to torch on a processor with AMX."
        ),
    ] = "auto"
    enforce_eager: Annotated[bool, Meta(description="Do not capture CUDA graphs.")] = False
    profile: Annotated[
        str, Meta(description="Write a torch profiler trace of the worker to this folder. Empty: no trace.")
    ] = ""


class FrontendOptions(Options, frozen=True):
    """The HTTP side."""

    host: Annotated[
        str, Meta(description="Address to listen on. If others can reach it, API keys or --insecure-bind are required.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on. 0: the system chooses one.", ge=0, le=65535)] = 8000
    insecure_bind: Annotated[
        bool,
        Meta(
            description="Allow an address that others can reach without API keys. Anyone who reaches it can then "
            "use the server."
        ),
    ] = False
    admin_port: Annotated[
        int,
        Meta(
            description="Port of a second listener for /metrics and /reset_prefix_cache, which --port then no "
            "longer answers. 0: no second listener.",
            ge=0,
            le=65535,
        ),
    ] = 0
    admin_host: Annotated[
        str,
        Meta(
            description="Address of the second listener. If others can reach it, API keys or --insecure-bind are "
            "required."
        ),
    ] = "127.0.0.1"
    num_frontends: Annotated[
        int, Meta(description="Number of frontend processes. They share the ports.", ge=1, le=64)
    ] = 1
    chat_template: Annotated[str, Meta(description="File with a chat template to use instead of the checkpoint's.")] = (
        ""
    )
    parse_special_tokens: Annotated[
        bool,
        Meta(
            description="Read special tokens that are spelled out in messages as special tokens, as transformers "
            "does. By default they are plain text, so that no message can end its own turn."
        ),
    ] = False
    api_keys_file: Annotated[
        str,
        Meta(
            description="TOML file with API keys (`penstock keys` makes entries). With this, or with a key in "
            "PENSTOCK_API_KEY, every route but /, /health and /ready requires a key."
        ),
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="Let all API keys without a `namespace` share one prefix cache. This is faster if their "
            "prompts have much in common, but lets each of them find out what others have asked. By "
            "default each key has a cache of its own."
        ),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose web pages may call this server from a browser, such as "
            "https://chat.example.org. Empty: none."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names under which a server without API keys answers, besides localhost; for "
            "instance the name of a reverse proxy. * allows any. Empty: localhost only on a loopback "
            "address, any name on another address."
        ),
    ] = ()
    tls_certificate: Annotated[
        str,
        Meta(
            description="PEM file with the server's certificate and its intermediate certificates. Requires --tls-key."
        ),
    ] = ""
    tls_key: Annotated[
        str, Meta(description="PEM file with the certificate's private key. With both files the server speaks https.")
    ] = ""
    max_body_bytes: Annotated[
        int,
        Meta(description="Largest request body in bytes. 0: 2 MiB plus 32 bytes per token of context.", ge=0),
    ] = 0
    max_connections: Annotated[
        int,
        Meta(
            description="Most open connections per frontend process. Further ones are answered with status 503.", ge=1
        ),
    ] = 8192
    head_timeout: Annotated[
        float, Meta(description="Time in which the request line and headers must arrive, in seconds.", gt=0.0)
    ] = 10.0
    body_timeout: Annotated[float, Meta(description="Longest pause within a request body, in seconds.", gt=0.0)] = 30.0
    strict_requests: Annotated[
        bool,
        Meta(
            description="Refuse requests that would otherwise get a warning: max_tokens beyond the context, "
            "fields without effect, output forms that cannot be enforced completely."
        ),
    ] = False
    max_n: Annotated[int, Meta(description="Largest `n` of a request.", ge=1, le=1024)] = 64
    max_request_seqs: Annotated[
        int,
        Meta(description="Most sequences in one request: the number of its prompts times `n` (or `best_of`).", ge=1),
    ] = 1024
    max_request_timeout: Annotated[
        float,
        Meta(
            description="Longest time for any request, in seconds, even if its x-request-timeout header asks for "
            "more. 0: no limit.",
            ge=0.0,
        ),
    ] = 0.0
    health_timeout: Annotated[
        float,
        Meta(
            description="Seconds without a finished step, while there is work, after which /health answers 503. "
            "Must be longer than the longest step.",
            gt=0.0,
        ),
    ] = 900.0
    slow_reader_timeout: Annotated[
        float,
        Meta(
            description="Seconds after which a client that does not read its stream is disconnected. Until then "
            "its request is paused.",
            ge=0.0,
        ),
    ] = 60.0
    shutdown_timeout: Annotated[
        float, Meta(description="Time that running requests get to finish after SIGTERM, in seconds.", ge=0.0)
    ] = 30.0
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "command_r",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "function_gemma",
            "functionary_v31",
            "functionary_v32",
            "gemma3",
            "gemma4",
            "generic",
            "glm",
            "glm47",
            "granite",
            "harmony",
            "hermes",
            "hunyuan",
            "internlm",
            "kimi_k2",
            "lfm2",
            "llama3_json",
            "minimax_m2",
            "mistral",
            "mistral_named",
            "nemotron",
            "olmo3",
            "phi4_mini",
            "pythonic",
            "qwen3_coder",
            "seed_oss",
        ],
        Meta(
            description="How the model writes tool calls. 'auto' finds out from the chat template, 'none' refuses"
            " tools."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "command_r",
            "gemma4",
            "granite",
            "harmony",
            "mistral",
            "seed_oss",
            "think",
            "think_answer",
            "think_response",
        ],
        Meta(description="How the model marks its reasoning. 'auto' finds out from the chat template."),
    ] = "auto"
    max_stored_responses: Annotated[
        int,
        Meta(description="Most stored responses per API key, for previous_response_id. 0: store none.", ge=0),
    ] = 1000
    max_stored_response_bytes: Annotated[
        int,
        Meta(
            description="Most bytes of stored responses per API key. The least recently used are dropped first.",
            ge=0,
        ),
    ] = 64 << 20
    response_store: Annotated[
        str,
        Meta(
            description="SQLite file for stored responses, which then survive a restart. Empty: a temporary file,"
            " shared by all frontends."
        ),
    ] = ""


class IpcOptions(Options, frozen=True):
    """Where the processes meet, and how long a peer may be silent."""

    frontend_address: Annotated[
        str,
        Meta(description="ZeroMQ address where scheduler and frontends meet. Empty: a private ipc:// socket."),
    ] = ""
    worker_address: Annotated[
        str,
        Meta(description="ZeroMQ address where scheduler and workers meet. Empty: a private ipc:// socket."),
    ] = ""
    runtime_dir: Annotated[
        str, Meta(description="Folder (mode 0700) for ipc:// sockets. Empty: a new temporary one.")
    ] = ""
    channel_key_file: Annotated[
        str,
        Meta(
            description="File with the CURVE keys for tcp:// addresses (`penstock keys --channel FILE` makes "
            "one). All processes of a launch need the same file; without it nobody can connect."
        ),
    ] = ""
    heartbeat_interval: Annotated[float, Meta(description="Seconds between heartbeats.", gt=0.0)] = 1.0
    heartbeat_timeout: Annotated[
        float, Meta(description="Seconds of silence after which a process counts as lost.", gt=0.0)
    ] = 10.0


class LogOptions(Options, frozen=True):
    """What the processes say of themselves."""

    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        Meta(
            description="Least severe level that is logged. 'auto' is info, or warning for `penstock serve` on a "
            "terminal."
        ),
    ] = "auto"
    log_format: Annotated[
        LogFormat,
        Meta(description="'console' for people, 'json' for machines. 'auto' is console on a terminal, else json."),
    ] = "auto"


class Config(Options, frozen=True):
    """All options of one launch. Frozen: whoever needs another value makes another Config."""

    model: ModelOptions = ModelOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    worker: WorkerOptions = WorkerOptions()
    frontend: FrontendOptions = FrontendOptions()
    ipc: IpcOptions = IpcOptions()
    log: LogOptions = LogOptions()


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/*,?#@]+")
"""As browsers write it: lower case, no path."""


class ConfigError(ValueError):
    """An option, or the checkpoint that it names, cannot work; the message is one clear sentence."""


def validate(config: Config) -> Config:
    """Check what one field's bounds cannot say; return the config unchanged.

    Raises:
        ConfigError: with the option's flag and its value.
    """
    page_size = config.scheduler.page_size
    if page_size & (page_size - 1):
        raise ConfigError(f"--page-size must be a power of two, got {page_size}")
    if config.scheduler.max_num_batched_tokens < 1:
        raise ConfigError("--max-num-batched-tokens must be at least 1")
    if config.ipc.heartbeat_timeout <= config.ipc.heartbeat_interval:
        raise ConfigError(
            f"--heartbeat-timeout ({config.ipc.heartbeat_timeout}) must exceed "
            f"--heartbeat-interval ({config.ipc.heartbeat_interval})"
        )
    if config.frontend.admin_port and config.frontend.admin_port == config.frontend.port:
        raise ConfigError(f"--admin-port ({config.frontend.admin_port}) must be another port than --port")
    for origin in config.frontend.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins {origin!r}: an origin is scheme://host or scheme://host:port, nothing else"
            )
    for flag, address in (
        ("--frontend-address", config.ipc.frontend_address),
        ("--worker-address", config.ipc.worker_address),
    ):
        if is_tcp(address) and not config.ipc.channel_key_file:
            raise ConfigError(
                f"{flag} {address!r} needs --channel-key-file (make one with `penstock keys --channel FILE`): "
                "without keys anybody who reaches it could send and read messages"
            )
    channel_keys(config)
    return config


def channel_keys(config: Config) -> ChannelKeys | None:
    """The keys of the launch's tcp:// addresses, if it has any.

    Raises:
        ConfigError: if the file cannot be used.
    """
    if not config.ipc.channel_key_file:
        return None
    try:
        return read_key_file(Path(config.ipc.channel_key_file))
    except KeyFileError as error:
        raise ConfigError(f"--channel-key-file {error}") from None
