"""Options of text-generation-inference and of llama.cpp's server, and other engines' values of options that exist here.

See `foreign_flags.py`, which has those of vLLM and SGLang, for what becomes of them.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple


class ForeignFlag(NamedTuple):
    """What to say about one; `same` are the values that change nothing here ("" for a switch without a value)."""

    use: str = ""  # the option that does the same here
    why: str = ""  # or why there is none
    same: tuple[str, ...] = ()


ON_DEMAND = ForeignFlag(why="adapters are loaded when they are named or asked for", same=("", "true", "True"))
_SCALED = ForeignFlag(why="an adapter's own scale is used (lora_alpha)")
_VECTORS = ForeignFlag(why="there are no control vectors")
_AFFINITY = ForeignFlag(why="start the server under taskset, numactl or nice")
_ALWAYS = ForeignFlag(why="it is always on", same=("", "on", "auto", "true", "1"))
_BEGINS = ForeignFlag(use="--max-num-batched-tokens")
_CACHE = ForeignFlag(use="the variable HF_HUB_CACHE")
_DRAFTS = ForeignFlag(use="--speculative-config")
_EMBEDS = ForeignFlag(why="a model that generates text makes embeddings, too", same=("",))
_RERANKS = ForeignFlag(why="a checkpoint that scores pairs does so, and others by their embeddings", same=("",))
_FROM_CONFIG = ForeignFlag(why="the model's own configuration gives it")
_LOGGED = ForeignFlag(use="--log-level or --log-format")
_LOADED = ForeignFlag(why="weights are read in one way", same=("auto",))
_LOOKUP = ForeignFlag(use='--speculative-config \'{"method": "ngram", ...}\'')
_NO_TOOLS = ForeignFlag(why="the server runs no tools; clients do")
_OF_REQUESTS = ForeignFlag(why="requests say it, and generation_config.json gives the defaults")
_ONE_DEVICE = ForeignFlag(why="weights are on one kind of device", same=("0",))
_ONE_MODEL = ForeignFlag(why="a server has one model; start one server for each")
_OTHER_FILE = ForeignFlag(why="download the file and give its path as MODEL")
_PARTS = ForeignFlag(use="--tensor-parallel-size or --pipeline-parallel-size")
_PROJECTOR = ForeignFlag(why="images need a checkpoint with the image model in it, such as Hugging Face's")
_SAMPLER = ForeignFlag(why="there is no such sampler")
_OF_EACH = ForeignFlag(why="requests say it")
_ZERO = ("0", "0.0", "0.00")

TGI: Mapping[str, ForeignFlag] = {
    "--model-id": ForeignFlag(use="--model, or MODEL alone"),
    "--num-shard": ForeignFlag(use="--tensor-parallel-size"),
    "--sharded": ForeignFlag(use="--tensor-parallel-size", same=("false",)),
    "--hostname": ForeignFlag(use="--host"),
    "-p": ForeignFlag(use="--port"),
    "--validation-workers": ForeignFlag(use="--num-frontends"),
    "--max-concurrent-requests": ForeignFlag(use="--max-num-queued-seqs"),
    "--max-best-of": ForeignFlag(why="`n` may be 64", same=("1", "2")),
    "--max-client-batch-size": ForeignFlag(use="--max-request-seqs"),
    "--max-stop-sequences": ForeignFlag(why="requests may have 1,024 stop strings"),
    "--max-top-n-tokens": ForeignFlag(why="requests may ask for the 20 best tokens"),
    "--max-input-tokens": ForeignFlag(use="--max-model-len, for prompt and output together"),
    "--max-input-length": ForeignFlag(use="--max-model-len, for prompt and output together"),
    "--max-total-tokens": ForeignFlag(use="--max-model-len"),
    "--max-batch-prefill-tokens": _BEGINS,
    "--max-batch-total-tokens": ForeignFlag(use="--gpu-memory-utilization or --num-pages"),
    "--max-batch-size": ForeignFlag(use="--max-num-seqs"),
    "--waiting-served-ratio": ForeignFlag(why="prompts are computed beside running requests; see --max-prefill-ms"),
    "--max-waiting-tokens": ForeignFlag(why="prompts are computed beside running requests; see --max-prefill-ms"),
    "--cuda-graphs": ForeignFlag(use="--enforce-eager to have none"),
    "--cuda-memory-fraction": ForeignFlag(use="--gpu-memory-utilization"),
    "--disable-custom-kernels": ForeignFlag(use="--cpu-kernels torch; GPUs have one set of kernels"),
    "--shard-uds-path": ForeignFlag(use="--runtime-dir"),
    "--master-addr": ForeignFlag(use="--rendezvous-address"),
    "--master-port": ForeignFlag(use="--rendezvous-address"),
    "--huggingface-hub-cache": _CACHE,
    "--weights-cache-override": _CACHE,
    "--rope-factor": _FROM_CONFIG,
    "--json-output": ForeignFlag(use="--log-format json"),
    "--otlp-endpoint": ForeignFlag(use="--otlp-traces-endpoint"),
    "--otlp-service-name": ForeignFlag(why="traces name the service penstock"),
    "--cors-allow-origin": ForeignFlag(use="--cors-origins"),
    "--watermark-gamma": ForeignFlag(why="there are no watermarks"),
    "--watermark-delta": ForeignFlag(why="there are no watermarks"),
    "--ngrok": ForeignFlag(why="run the tunnel beside the server"),
    "--ngrok-authtoken": ForeignFlag(why="run the tunnel beside the server"),
    "--ngrok-edge": ForeignFlag(why="run the tunnel beside the server"),
    "--tokenizer-config-path": ForeignFlag(use="--chat-template for a template; the rest comes from the checkpoint"),
    "--disable-grammar-support": ForeignFlag(why="a request without a grammar pays nothing for it"),
    "--usage-stats": ForeignFlag(why="nothing is sent to anyone", same=("off",)),
    "--payload-limit": ForeignFlag(use="--max-body-bytes"),
    "--enable-prefill-logprobs": _ALWAYS,
}

LLAMA_CPP: Mapping[str, ForeignFlag] = {
    # The model.
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), ForeignFlag(use="ORG/NAME:QUANT as MODEL")),
    **dict.fromkeys(("-hff", "--hf-file"), ForeignFlag(use="ORG/NAME:QUANT as MODEL")),
    **dict.fromkeys(("-hft", "--hf-token"), ForeignFlag(use="the variable HF_TOKEN")),
    **dict.fromkeys(("-mu", "--model-url", "-dr", "--docker-repo"), _OTHER_FILE),
    "--offline": ForeignFlag(use="the variable HF_HUB_OFFLINE"),
    **dict.fromkeys(("-mm", "--mmproj", "-mmu", "--mmproj-url"), _PROJECTOR),
    **dict.fromkeys(("--no-mmproj", "--no-mmproj-auto"), _PROJECTOR._replace(same=("",))),
    "--lora-scaled": _SCALED,
    "--lora-init-without-apply": ForeignFlag(why="requests name the adapter as their model", same=("",)),
    **dict.fromkeys(("--control-vector", "--control-vector-scaled"), _VECTORS),
    **dict.fromkeys(("--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"), _FROM_CONFIG),
    **dict.fromkeys(("--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow"), _FROM_CONFIG),
    **dict.fromkeys(("--yarn-beta-fast", "--override-kv"), _FROM_CONFIG),
    **dict.fromkeys(("--models-dir", "--models-preset", "--models-max", "--models-autoload"), _ONE_MODEL),
    "--chat-template-file": ForeignFlag(use="--chat-template"),
    "--chat-template-kwargs": ForeignFlag(why="requests have a field chat_template_kwargs"),
    # Memory and devices.
    **dict.fromkeys(("-b", "-ub", "--ubatch-size"), _BEGINS),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), ForeignFlag(use="--kv-cache-dtype")),
    **dict.fromkeys(("-fa", "--flash-attn", "-kvu", "--kv-unified", "-fit", "--fit", "--repack"), _ALWAYS),
    **dict.fromkeys(("-kvo", "--kv-offload", "--op-offload"), _ALWAYS),
    **dict.fromkeys(("-nkvo", "--no-kv-offload"), ForeignFlag(why="keys and values are where the model is computed")),
    "-dev": ForeignFlag(use="--device"),
    "--list-devices": ForeignFlag(use="`penstock doctor`"),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "--rpc"), _PARTS),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"), _ONE_DEVICE),
    **dict.fromkeys(("--moe-cache-mib", "-ncffn", "--n-cpu-ffn"), _ONE_DEVICE),
    **dict.fromkeys(("--mlock", "--no-mmap", "-lm", "--load-mode", "-lzm", "--lazy-mode"), _LOADED),
    **dict.fromkeys(("-cram", "--cache-ram"), ForeignFlag(use="--host-kv-gib", same=("0",))),
    "--slot-save-path": ForeignFlag(use="--disk-kv"),
    "--cache-prompt": _ALWAYS,
    "--no-cache-prompt": ForeignFlag(use="--no-enable-prefix-caching"),
    "--cache-reuse": ForeignFlag(why="equal beginnings are reused, other parts are not", same=("0",)),
    **dict.fromkeys(("-sps", "--slot-prompt-similarity"), ForeignFlag(why="equal beginnings are found by themselves")),
    **dict.fromkeys(("-ctxcp", "--ctx-checkpoints"), ForeignFlag(use="--state-snapshots-gib")),
    "--swa-full": ForeignFlag(why="layers with a window keep what it needs"),
    "--context-shift": ForeignFlag(why="a text ends when the context is full"),
    "--no-context-shift": ForeignFlag(why="a text ends when the context is full", same=("",)),
    "--keep": ForeignFlag(why="a text ends when the context is full", same=("0",)),
    **dict.fromkeys(("-cb", "--cont-batching"), _ALWAYS),
    **dict.fromkeys(("-nocb", "--no-cont-batching"), ForeignFlag(use="--batching static")),
    **dict.fromkeys(("-tb", "--threads-batch"), ForeignFlag(use="--num-threads")),
    "--threads-http": ForeignFlag(use="--num-frontends"),
    **dict.fromkeys(
        ("-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll", "--numa"), _AFFINITY
    ),
    "--warmup": _ALWAYS,
    "--no-warmup": ForeignFlag(why="the first request would wait for it"),
    "--sleep-idle-seconds": ForeignFlag(why="the weights stay in memory until the server ends", same=("-1",)),
    # The server.
    "--api-key-file": ForeignFlag(use="--api-keys-file"),
    "--ssl-key-file": ForeignFlag(use="--tls-key"),
    "--ssl-cert-file": ForeignFlag(use="--tls-certificate"),
    "--api-prefix": ForeignFlag(why="let the proxy remove its prefix from paths"),
    "--path": ForeignFlag(why="let the proxy serve files"),
    **dict.fromkeys(("-to", "--timeout"), ForeignFlag(use="--max-request-timeout")),
    "--sse-ping-interval": ForeignFlag(why="silent streams get a comment every 15 seconds"),
    **dict.fromkeys(("--metrics", "--slots"), _ALWAYS),
    "--no-slots": ForeignFlag(use="--admin-port, which takes /debug/* away from --port"),
    "--props": ForeignFlag(why="options are set when the server starts"),
    **dict.fromkeys(("--cors-methods", "--cors-headers", "--cors-credentials"), ForeignFlag(use="--cors-origins")),
    "--reuse-port": ForeignFlag(use="--num-frontends"),
    **dict.fromkeys(("--ui-config", "--ui-config-file", "--webui-config"), ForeignFlag(why="the page keeps its own")),
    "--tags": ForeignFlag(use="--served-model-name"),
    "--media-path": ForeignFlag(why="images come in requests, or from --image-hosts"),
    **dict.fromkeys(
        ("--image-min-tokens", "--image-max-tokens"), ForeignFlag(why="the model's own processor chooses the size")
    ),
    "--log-prompts-dir": ForeignFlag(use="--record with --record-prompts"),
    **dict.fromkeys(("--webui", "--ui"), ForeignFlag(use="--web-ui on")),
    **dict.fromkeys(("--no-webui", "--no-ui"), ForeignFlag(use="--web-ui off")),
    **dict.fromkeys(("--tools", "--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent"), _NO_TOOLS),
    "--embedding": _EMBEDS,
    **dict.fromkeys(("--rerank", "--reranking"), _RERANKS),
    **dict.fromkeys(("-v", "--verbose", "-lv", "--verbosity", "--log-verbosity", "--log-disable"), _LOGGED),
    **dict.fromkeys(("--log-jsonl", "--log-colors", "--log-prefix", "--log-timestamps"), _LOGGED),
    "--log-file": ForeignFlag(why="redirect the standard error, where the log goes"),
    # Requests.
    **dict.fromkeys(("-n", "--predict", "--n-predict"), _OF_REQUESTS._replace(same=("-1",))),
    **dict.fromkeys(("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "-s"), _OF_REQUESTS),
    **dict.fromkeys(("--repeat-penalty", "--presence-penalty", "--frequency-penalty"), _OF_REQUESTS),
    **dict.fromkeys(("--ignore-eos", "-l", "--logit-bias", "-sp", "--special", "-r", "--reverse-prompt"), _OF_REQUESTS),
    **dict.fromkeys(("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"), _OF_REQUESTS),
    **dict.fromkeys(("--xtc-probability", "--dry-multiplier", "--dynatemp-range"), _OF_EACH._replace(same=_ZERO)),
    **dict.fromkeys(("--typical", "--typical-p"), _OF_EACH._replace(same=("1", "1.0", "1.00"))),
    **dict.fromkeys(("--top-nsigma", "--top-n-sigma"), _OF_EACH._replace(same=("-1", "-1.0"))),
    **dict.fromkeys(("--xtc-threshold", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n"), _OF_EACH),
    **dict.fromkeys(("--dry-sequence-breaker", "--dynatemp-exp"), _OF_EACH),
    **dict.fromkeys(("--samplers", "--sampler-seq", "--sampling-seq"), _OF_EACH),
    "--mirostat": _OF_EACH._replace(same=_ZERO),
    "--adaptive-target": _SAMPLER._replace(same=("-1", "-1.0")),
    **dict.fromkeys(("--mirostat-lr", "--mirostat-ent"), _OF_EACH),
    **dict.fromkeys(("--adaptive-decay", "-bs", "--backend-sampling"), _SAMPLER),
    "--repeat-last-n": ForeignFlag(why="penalties look at the whole text", same=("-1",)),
    "--reasoning-format": ForeignFlag(why="reasoning always has a field of its own", same=("auto", "deepseek")),
    **dict.fromkeys(("-rea", "--reasoning"), ForeignFlag(why="requests say reasoning_effort", same=("auto",))),
    "--reasoning-effort": ForeignFlag(why="requests say reasoning_effort", same=("default",)),
    "--reasoning-budget-message": ForeignFlag(why="requests say reasoning_effort"),
    "--reasoning-budget": ForeignFlag(why="requests say reasoning_effort", same=("-1",)),
    "--skip-chat-parsing": ForeignFlag(use="--tool-call-parser none with --reasoning-parser none"),
    "--prefill-assistant": ForeignFlag(why="requests say continue_final_message"),
    "--no-prefill-assistant": ForeignFlag(why="requests say continue_final_message", same=("",)),
    "--spm-infill": ForeignFlag(why="the prompt is built as the model's authors describe"),
    # Drafts.
    **dict.fromkeys(("--spec-draft-model", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"), _DRAFTS),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--draft-p-min", "--draft-p-split", "--draft-n"), _DRAFTS),
    **dict.fromkeys(("-devd", "--device-draft", "-ngld", "--gpu-layers-draft", "-td", "--threads-draft"), _DRAFTS),
    **dict.fromkeys(("-ctkd", "--cache-type-k-draft", "-ctvd", "--cache-type-v-draft", "--spec-default"), _DRAFTS),
    **dict.fromkeys(("-lcs", "--lookup-cache-static", "--spec-ngram-size-n", "--spec-ngram-size-m"), _LOOKUP),
    **dict.fromkeys(("--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match"), _LOOKUP),
    **dict.fromkeys(("--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"), _LOOKUP),
    **dict.fromkeys(("--spec-ngram-simple-min-hits", "--spec-ngram-min-hits"), _LOOKUP),
}

_THINK = "deepseek_r1 deepseek-r1 deepseek_v3 deepseek-v3 qwen3 qwen3-thinking glm45 kimi kimi_k2 minimax minimax_m2"

VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--kv-cache-dtype": {"fp8_e4m3fn": "fp8_e4m3"},
    "--reasoning-parser": {
        **dict.fromkeys((*_THINK.split(), "nemotron_v3", "nano_v3", "olmo3", "holo2", "step3p5"), "think"),
        **dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony"),
        "hunyuan_a13b": "think_answer",
        "ernie45": "think_response",
    },
    "--tool-call-parser": {
        **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
        **dict.fromkeys(("qwen", "qwen25", "granite4", "ernie45"), "hermes"),
        **dict.fromkeys(("qwen3_xml", "step3p5"), "qwen3_coder"),
        **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
        "llama4_pythonic": "pythonic",
        "glm45": "glm",
        **dict.fromkeys(("hunyuan_a13b", "jamba"), "hunyuan"),
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "deepseekv32": "deepseek_v32",
        "minimax": "minimax_m1",
        "minimax-m2": "minimax_m2",
        "phi4_mini_json": "phi4_mini",
        "functiongemma": "function_gemma",
    },
}
"""Options of the same name here -> values of other engines, and what they are called here."""


def adapters_in(text: str) -> list[str]:
    """NAME=PATH of each adapter in a value of vLLM's `--lora-modules`: that itself, or in JSON an object or a list.

    Raises:
        ValueError: what is wrong with it, to be read after the option's name.
    """
    if not text.startswith(("{", "[")):
        return [text]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    adapters = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict) or set(each) - {"name", "path", "base_model_name"}:
            raise ValueError(f"{text!r}: an adapter has a name, a path, and perhaps a base_model_name")
        if not all(isinstance(each.get(field), str) and each[field] for field in ("name", "path")):
            raise ValueError(f"{text!r}: name and path must be texts")
        adapters.append(f"{each['name']}={each['path']}")
    return adapters
