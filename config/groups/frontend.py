"""Options: the frontends."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Options, Shown

_LISTENER = re.compile(r"(?:(\[[^]]+]|[^][:]+):)?([0-9]{1,5})")
"""PORT, HOST:PORT or [IPV6]:PORT."""


class FrontendOptions(Options, frozen=True):
    """The HTTP side."""

    host: Annotated[
        str,
        Meta(description="Address to listen on. If others can reach it, API keys or --insecure-bind are required."),
        Shown(line="address to listen on"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(description="Port to listen on. 0: the system chooses one.", ge=0, le=65535),
        Shown(line="port to listen on; 0: any"),
    ] = 8000
    insecure_bind: Annotated[
        bool,
        Meta(
            description="Allow an address that others can reach without API keys. Anyone who reaches it can then "
            "use the server."
        ),
        Shown(line="let others reach it without API keys"),
    ] = False
    admin_port: Annotated[
        str,
        Meta(
            description="Port of a second listener for /metrics, /engines, /debug/*, /reset_prefix_cache, "
            "/start_profile, /stop_profile and the loading of adapters, which --port then no longer answers: on "
            "127.0.0.1 or, as HOST:PORT, on another address. If others can reach it, API keys or --insecure-bind are "
            "required. Empty or 0: no second listener."
        ),
        Shown("[HOST:]PORT", "second port, for /metrics, /engines, /debug alone"),
    ] = ""
    web_ui: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Show browsers a page at `/` (docs/web-ui.md): to chat, and to see what the scheduler does. "
            "'auto': where only this machine can reach --host."
        ),
        Shown(line="a page for browsers at /"),
    ] = "auto"
    num_frontends: Annotated[
        int,
        Meta(description="Number of frontend processes. They share the ports.", ge=1, le=64),
        Shown(line="frontend processes", also=("--api-server-count",)),
    ] = 1
    routing: Annotated[
        Literal["prefix", "least-loaded", "round-robin"],
        Meta(
            description="Which of several engines a request goes to (docs/routing.md). 'prefix': where most of its "
            "prompt is cached, until more waits there than that saves; 'least-loaded': where the least waits; "
            "'round-robin': each in turn."
        ),
        Shown("NAME", "prefix, least-loaded or round-robin"),
    ] = "prefix"
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls", "max"],
        Meta(
            description="What an embedding is made of (docs/embeddings.md): the hidden state of the 'last' or "
            "the first token ('cls'), or the 'mean' or the largest numbers ('max') of all. 'auto': as the checkpoint's "
            "modules.json says, or else 'last', and 'mean' for encoders."
        ),
    ] = "auto"
    chat_template: Annotated[
        str,
        Meta(description="File with a chat template to use instead of the checkpoint's."),
        Shown("PATH", "chat template to use instead of the model's"),
    ] = ""
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
            "PENSTOCK_API_KEY, every route but probes and the web UI requires a key."
        ),
        Shown("PATH", "API keys; for a single one, the variable PENSTOCK_API_KEY"),
    ] = ""
    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; "
            "each request is told to it as a trace. Needs the packages of penstock-llm[otel]. Empty: no traces."
        ),
        Shown("URL"),
    ] = ""
    access_log: Annotated[
        str,
        Meta(
            description="File that gets a line for each request, beside the log; SIGHUP opens it anew. Lines are as "
            "web servers write them or, if its name ends with .json or .jsonl, JSON objects. Empty: none."
        ),
        Shown("PATH", "a line for each request"),
    ] = ""
    metrics_names: Annotated[
        Literal["penstock", "both"],
        Meta(
            description="Under which names /metrics tells what it counts: 'penstock' is our own; 'both' adds vLLM's "
            "(vllm:...), for dashboards and endpoint pickers that read those."
        ),
    ] = "penstock"
    price_per_hour: Annotated[
        float,
        Meta(
            description="Price of an hour of one engine's devices, in any currency. Bills of requests then have a "
            "price: that of their device seconds. 0: none.",
            ge=0.0,
        ),
        Shown("PRICE"),
    ] = 0.0
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose web pages may call this server from a browser, such as "
            "https://chat.example.org. Empty: none."
        ),
        Shown("ORIGIN", "origins whose web pages may call this server"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names under which a server without API keys answers, besides localhost; for "
            "instance the name of a reverse proxy. * allows any. Empty: localhost only on a loopback "
            "address, any name on another address."
        ),
        Shown("HOST", "host names that it answers to without API keys"),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses and networks of reverse proxies, such as 10.0.0.7 or 172.16.0.0/12, that are "
            "believed when they say which client they speak for: in X-Forwarded-For or Forwarded, or by the PROXY "
            "protocol (docs/operations.md). Empty: none; the client is who has connected."
        ),
        Shown("NETWORK"),
    ] = ()
    tls_certificate: Annotated[
        str,
        Meta(
            description="PEM file with the server's certificate and its intermediate certificates. Requires --tls-key."
        ),
        Shown("PATH", "PEM file: speak https", ("--ssl-certfile",)),
    ] = ""
    tls_key: Annotated[
        str,
        Meta(description="PEM file with the certificate's private key. With both files the server speaks https."),
        Shown("PATH", "PEM file with the certificate's private key", ("--ssl-keyfile",)),
    ] = ""
    max_body_bytes: Annotated[
        int,
        Meta(description="Largest request body in bytes. 0: 2 MiB plus 32 bytes per token of context.", ge=0),
    ] = 0
    head_timeout: Annotated[
        float,
        Meta(description="Time in which the request line and headers must arrive, in seconds.", gt=0.0),
        INTERNAL,
    ] = 10.0
    body_timeout: Annotated[
        float, Meta(description="Longest pause within a request body, in seconds.", gt=0.0), INTERNAL
    ] = 30.0
    strict_requests: Annotated[
        bool,
        Meta(
            description="Refuse requests that would otherwise get a warning: max_tokens beyond the context, "
            "fields without effect, output forms that cannot be enforced completely."
        ),
        INTERNAL,
    ] = False
    max_n: Annotated[int, Meta(description="Largest `n` of a request.", ge=1, le=1024), INTERNAL] = 64
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
        Shown(line="longest time for any request; 0: no limit"),
    ] = 0.0
    slow_reader_timeout: Annotated[
        float,
        Meta(
            description="Seconds after which a client that does not read its stream is disconnected. Until then "
            "its request is paused.",
            ge=0.0,
        ),
        INTERNAL,
    ] = 60.0
    shutdown_timeout: Annotated[
        float,
        Meta(description="Time that running requests get to finish after SIGTERM, in seconds.", ge=0.0),
        Shown(line="time for running requests after SIGTERM"),
    ] = 30.0
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "command_r",
            "command_r_plus",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "firefunction",
            "function_gemma",
            "functionary_v31",
            "functionary_v32",
            "gemma3",
            "gemma4",
            "generic",
            "gigachat",
            "gigachat3",
            "glimmer",
            "glm",
            "glm47",
            "granite",
            "harmony",
            "hermes",
            "hunyuan",
            "hy3",
            "internlm",
            "kimi_k2",
            "kimi_k3",
            "lfm2",
            "llama3_json",
            "minicpm5",
            "minimax_m1",
            "minimax_m2",
            "minimax_m3",
            "mistral",
            "mistral_named",
            "nemotron",
            "olmo3",
            "phi4_mini",
            "pythonic",
            "qwen3_coder",
            "seed_oss",
            "solar_open",
        ],
        Meta(
            description="How the model writes tool calls. 'auto' finds out from the chat template, 'none' refuses"
            " tools."
        ),
        Shown("NAME", "how the model writes tool calls; none: refuse tools"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "apriel",
            "cohere_text",
            "command_r",
            "gemma4",
            "glimmer",
            "granite",
            "harmony",
            "hy3",
            "kimi_k3",
            "minimax_m3",
            "mistral",
            "seed_oss",
            "solar_open",
            "think",
            "think_answer",
            "think_response",
        ],
        Meta(description="How the model marks its reasoning. 'auto' finds out from the chat template."),
        Shown("NAME", "how the model marks its reasoning"),
    ] = "auto"
    max_resumable_bytes: Annotated[
        int,
        Meta(
            description="Most bytes that a frontend keeps of streams that outlive their connections "
            "(docs/resumable-streams.md): those with the header x-resumable, and background responses. 0: none do.",
            ge=0,
        ),
    ] = 256 << 20
    data_dir: Annotated[
        str,
        Meta(
            description="Folder for what outlives the server: a SQLite database, uploaded files, batches and their "
            "results, stored responses and conversations (docs/batches.md). All frontends of a launch share it. Empty: "
            "no files, no batches, and responses last as long as the server."
        ),
        Shown("PATH", "folder for uploaded files, batches and stored responses"),
    ] = ""
    max_files_bytes: Annotated[
        int, Meta(description="Most bytes of uploaded files per API key in --data-dir.", ge=1)
    ] = 10 << 30

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of the second listener; None without one.

        Raises:
            ValueError: --admin-port is neither PORT nor HOST:PORT.
        """
        if self.admin_port in ("", "0"):
            return None
        found = _LISTENER.fullmatch(self.admin_port)
        if found is None or int(found[2]) > 65535:
            raise ValueError("it must be PORT or HOST:PORT")
        return (found[1] or "127.0.0.1").strip("[]"), int(found[2])
