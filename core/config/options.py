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
LogFormat = Literal["auto", "console", "json"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the option groups."""


class ModelOptions(Options, frozen=True):
    """Which checkpoint, and under which names."""

    model: Annotated[str, Meta(description="Hugging Face checkpoint folder; empty for the bundled demo model.")] = ""
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="Names under which the API knows the model; the first is the one it reports.")
    ] = ()
    max_model_len: Annotated[
        int,
        Meta(
            description="Longest prompt plus output of one sequence, in tokens; 0: what model and KV pool allow.",
            ge=0,
        ),
    ] = 0


class SchedulerOptions(Options, frozen=True):
    """How steps are filled."""

    max_num_seqs: Annotated[int, Meta(description="Most sequences in one step (rows).", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Meta(description="Most tokens computed in one step.", ge=1, le=1 << 20)] = (
        2048
    )
    max_prefill_ms: Annotated[
        int,
        Meta(
            description="Milliseconds that a step with prompts should take at most while others stream: their chunks "
            "are made shorter. 0 for any time.",
            ge=0,
        ),
    ] = 250
    page_size: Annotated[int, Meta(description="Tokens per KV page, a power of two.", ge=1, le=1024)] = 16
    pipeline_depth: Annotated[
        int, Meta(description="Steps planned ahead of the results: 0 waits for each step, 1 overlaps one.", ge=0, le=4)
    ] = 1
    enable_prefix_caching: Annotated[
        bool, Meta(description="Keep finished sequences' pages and reuse them for equal prefixes.")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="Order of waiting requests: by arrival, or by the request's priority first."),
    ] = "fcfs"
    max_num_queued_seqs: Annotated[
        int, Meta(description="Most sequences waiting; more are refused with status 429.", ge=1)
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            description="Most prompt tokens waiting; more are refused with status 429, unless nobody waits.",
            ge=1,
        ),
    ] = 4 << 20
    queue_patience: Annotated[
        float,
        Meta(
            description="Seconds that a request should wait for a row at most: one that would wait longer, at the rate "
            "at which the queue empties, is refused with status 429. As many as there are rows may wait in any case. "
            "0 for any time.",
            ge=0.0,
        ),
    ] = 4.0
    overload_order: Annotated[
        Literal["oldest", "newest"],
        Meta(description="Whose turn it is while half of what may wait does: the request that came first, or last."),
    ] = "oldest"
    queue_timeout: Annotated[
        float,
        Meta(description="Seconds a request may wait for its first row, then status 504; 0 for any time.", ge=0.0),
    ] = 0.0
    step_trace: Annotated[str, Meta(description="File that gets one JSON line per step; empty for none.")] = ""


class WorkerOptions(Options, frozen=True):
    """The process that holds weights and KV pool."""

    device: Annotated[str, Meta(description="'auto', 'cpu', 'cuda' or 'cuda:N'.")] = "auto"
    dtype: Annotated[
        DTypeName,
        Meta(description="Type of weights and KV; 'auto' takes the checkpoint's where the device is fast in it."),
    ] = "auto"
    load_format: Annotated[
        Literal["safetensors", "dummy"], Meta(description="'dummy' makes random weights of the right shapes.")
    ] = "safetensors"
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of the device's memory for weights, activations and KV pool.", gt=0.0, le=1.0)
    ] = 0.9
    cpu_kv_cache_gib: Annotated[
        float, Meta(description="KV pool on a CPU in GiB; 0 for a tenth of the free memory, 4 GiB at most.", ge=0.0)
    ] = 0.0
    num_pages: Annotated[int, Meta(description="Size of the KV pool in pages; 0 to size it from memory.", ge=0)] = 0
    num_threads: Annotated[
        int,
        Meta(
            description="Threads of the CPU kernels, at most; 0 for all cores given to this process.",
            ge=0,
        ),
    ] = 0
    spare_worker: Annotated[
        bool,
        Meta(
            description="Keep a second process ready that has imported everything but has no weights (some 200 MB), "
            "and forks a new worker off at once when one is lost."
        ),
    ] = True
    cpu_kernels: Annotated[
        CpuKernels,
        Meta(
            description="Kernels of a CPU: 'native' ones in C++, compiled once if they are not there yet (takes "
            "seconds and a C++ compiler), or torch's; 'auto' takes native ones that are there."
        ),
    ] = "auto"
    enforce_eager: Annotated[bool, Meta(description="Do not capture CUDA graphs.")] = False
    profile: Annotated[str, Meta(description="Folder for a torch profiler trace of the worker; empty for none.")] = ""


class FrontendOptions(Options, frozen=True):
    """The HTTP side."""

    host: Annotated[
        str, Meta(description="Address to listen on; one that others can reach wants API keys, or --insecure-bind.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 lets the system choose.", ge=0, le=65535)] = 8000
    insecure_bind: Annotated[
        bool, Meta(description="Listen where others can reach it without any API key: they may ask everything.")
    ] = False
    admin_port: Annotated[
        int,
        Meta(
            description="Port of a second listener, which alone answers /metrics and /reset_prefix_cache then; "
            "0 for none: --port answers them, too.",
            ge=0,
            le=65535,
        ),
    ] = 0
    admin_host: Annotated[str, Meta(description="Its address; the same holds of it as of --host.")] = "127.0.0.1"
    num_frontends: Annotated[int, Meta(description="Frontend processes that share the ports.", ge=1, le=64)] = 1
    chat_template: Annotated[
        str, Meta(description="File with a chat template to use in place of the checkpoint's own.")
    ] = ""
    parse_special_tokens: Annotated[
        bool,
        Meta(
            description="Read the spelling of a special token in messages as that token, as transformers does. "
            "Otherwise it is plain text, and nobody's text can end its turn."
        ),
    ] = False
    api_keys_file: Annotated[
        str,
        Meta(
            description="TOML file of API keys (`penstock keys` makes entries). With keys, or one in the variable "
            "PENSTOCK_API_KEY, every route but /, /health and /ready wants one."
        ),
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="API keys without a `namespace` of their own share cached prompts. Faster where they have "
            "prompts in common, but each can find out what others have asked. Without it a key shares with nobody."
        ),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(description="Origins (https://chat.example.org) whose pages may ask from a browser; none by default."),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names, besides localhost, under which a server without API keys may be asked, such as a "
            "reverse proxy's; * for any. If none is given, any name will do on another than a loopback address."
        ),
    ] = ()
    tls_certificate: Annotated[
        str,
        Meta(description="PEM file with the server's certificate and those between it and its root; wants --tls-key."),
    ] = ""
    tls_key: Annotated[
        str, Meta(description="PEM file with the certificate's private key. With both, connections are TLS (https).")
    ] = ""
    max_body_bytes: Annotated[
        int,
        Meta(description="Largest request body; 0 for 2 MiB and 32 bytes for each token of context.", ge=0),
    ] = 0
    max_connections: Annotated[
        int,
        Meta(description="Most open connections of each frontend process; more are answered with status 503.", ge=1),
    ] = 8192
    head_timeout: Annotated[
        float, Meta(description="Seconds in which a request's line and headers must have come.", gt=0.0)
    ] = 10.0
    body_timeout: Annotated[
        float, Meta(description="Seconds without a byte after which a request's unfinished body is given up.", gt=0.0)
    ] = 30.0
    strict_requests: Annotated[
        bool,
        Meta(
            description="Refuse what would only get a warning: max_tokens beyond the context, fields without effect, "
            "forms that cannot be followed whole."
        ),
    ] = False
    max_n: Annotated[int, Meta(description="Largest `n` of a request.", ge=1, le=1024)] = 64
    max_request_seqs: Annotated[
        int, Meta(description="Most sequences of one request: its prompts times `n` (or `best_of`).", ge=1)
    ] = 1024
    max_request_timeout: Annotated[
        float,
        Meta(
            description="Most seconds a request may take, whatever its x-request-timeout says or if it has none; "
            "0 for no bound.",
            ge=0.0,
        ),
    ] = 0.0
    health_timeout: Annotated[
        float,
        Meta(
            description="Seconds without any step, though there is work, after which /health says 503. More than one "
            "step takes at most, with all its tokens.",
            gt=0.0,
        ),
    ] = 900.0
    slow_reader_timeout: Annotated[
        float,
        Meta(
            description="Seconds without a read after which a client is given up whose answer waits for it; until "
            "then the engine pauses its stream.",
            ge=0.0,
        ),
    ] = 60.0
    shutdown_timeout: Annotated[
        float, Meta(description="Seconds that running streams get to finish after SIGTERM.", ge=0.0)
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
        Meta(description="How the model writes tool calls; 'auto' looks at its chat template, 'none' refuses tools."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "command_r",
            "gemma4",
            "harmony",
            "mistral",
            "seed_oss",
            "think",
        ],
        Meta(description="How the model marks its reasoning; 'auto' looks at its chat template."),
    ] = "auto"
    max_stored_responses: Annotated[
        int,
        Meta(description="Responses kept for previous_response_id, for each API key; 0 for none.", ge=0),
    ] = 1000
    max_stored_response_bytes: Annotated[
        int,
        Meta(
            description="Bytes that those of an API key may take together; its least recently used ones go first.",
            ge=0,
        ),
    ] = 64 << 20
    response_store: Annotated[
        str,
        Meta(
            description="SQLite file in which responses are kept beyond the end of the server; empty for one that "
            "all frontends of a launch share and that goes with it."
        ),
    ] = ""


class IpcOptions(Options, frozen=True):
    """Where the processes meet, and how long a peer may be silent."""

    frontend_address: Annotated[
        str,
        Meta(description="ZeroMQ address where the scheduler meets the frontends; empty for a private ipc:// socket."),
    ] = ""
    worker_address: Annotated[
        str,
        Meta(description="ZeroMQ address where the scheduler meets the workers; empty for a private ipc:// socket."),
    ] = ""
    runtime_dir: Annotated[
        str, Meta(description="Folder (mode 0700) for the ipc:// sockets; empty for a fresh one.")
    ] = ""
    channel_key_file: Annotated[
        str,
        Meta(
            description="File with the CURVE keys of the tcp:// addresses (`penstock keys --channel FILE` makes one): "
            "every process of the launch needs the same, and nobody without it gets in."
        ),
    ] = ""
    heartbeat_interval: Annotated[float, Meta(description="Seconds between signs of life.", gt=0.0)] = 1.0
    heartbeat_timeout: Annotated[
        float, Meta(description="Seconds of silence after which a peer counts as gone.", gt=0.0)
    ] = 10.0


class LogOptions(Options, frozen=True):
    """What the processes say of themselves."""

    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        Meta(
            description="Least severe level that is logged; 'auto' is info, "
            "but warning for `penstock serve` on a terminal."
        ),
    ] = "auto"
    log_format: Annotated[
        LogFormat, Meta(description="'console' for people, 'json' for machines, 'auto' by whether a terminal reads.")
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
