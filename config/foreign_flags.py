"""Options of other engines, which people try first: what replaces them here, or why there is nothing like them.

A value that asks for what Penstock does anyway is accepted, so that a command for another engine works if it can.
"""

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from penstock.config.flags import ENVIRONMENT_PREFIX, flags
from penstock.config.foreign_tables import LLAMA_CPP, ON_DEMAND, TGI, VALUES, ForeignFlag, adapters_in
from penstock.config.options import ConfigError
from penstock.config.removed import why_gone

_DRAFTS = ForeignFlag(use="--speculative-config")
_LOOKUP = ForeignFlag(use='--speculative-config \'{"method": "ngram", ...}\'')
_EMBEDS = "the checkpoint says what a model does; one that generates text makes embeddings, too"
_ON_ALREADY = ForeignFlag(why="it is always on", same=("", "true", "True"))
_OFF = ("off", "false", "False", "0")
"""Behind a switch these are values, and no models."""

FLAGS_OF_ENGINES: Mapping[str, Mapping[str, ForeignFlag]] = {
    "vLLM": {
        "--enable-eplb": ForeignFlag(use="--expert-load with --num-redundant-experts"),
        "--eplb-config": ForeignFlag(use="--expert-load with --num-redundant-experts"),
        "--all2all-backend": ForeignFlag(why="what sends fewer bytes is chosen"),
        "--distributed-executor-backend": ForeignFlag(use="--launcher", same=("mp", "uni")),
        "--enable-sleep-mode": ForeignFlag(why="the weights stay in memory until the server ends"),
        "--root-path": ForeignFlag(why="let the proxy remove its prefix from paths"),
        "--enable-lora": ON_DEMAND,
        "--lora-dtype": ForeignFlag(why="adapters are computed as the model is", same=("auto",)),
        "--fully-sharded-loras": ForeignFlag(why="adapters are sharded as the model is", same=("",)),
        "--lora-extra-vocab-size": ForeignFlag(why="adapters use the model's own embeddings", same=("0",)),
        "--default-mm-loras": ForeignFlag(why="requests name the adapter as their model"),
        "--trust-remote-code": ForeignFlag(why="code in a checkpoint is never run"),
        "--speculative-model": _DRAFTS,
        "--num-speculative-tokens": _DRAFTS,
        "--ngram-prompt-lookup-max": _LOOKUP,
        "--ngram-prompt-lookup-min": _LOOKUP,
        "--speculative-disable-by-batch-size": ForeignFlag(why="the number of draft tokens follows the load"),
        "--swap-space": ForeignFlag(use="--host-kv-gib", same=("0",)),
        "--cpu-offload-gb": ForeignFlag(why="weights are on one device", same=("0",)),
        "--kv-cache-memory-bytes": ForeignFlag(use="--num-pages or, on a CPU, --cpu-kv-cache-gib"),
        "--max-seq-len-to-capture": ForeignFlag(why="CUDA graphs hold decodes of every length"),
        "--api-key": ForeignFlag(use="--api-keys-file, or the variable PENSTOCK_API_KEY"),
        "--allowed-origins": ForeignFlag(use="--cors-origins"),
        "--collect-detailed-traces": ForeignFlag(why="traces always have the queue, prefill and decode of a request"),
        "--disable-log-requests": ForeignFlag(use="--log-level warning"),
        "--no-enable-log-requests": ForeignFlag(use="--log-level warning"),
        "--uvicorn-log-level": ForeignFlag(use="--log-level"),
        "--download-dir": ForeignFlag(use="the variable HF_HUB_CACHE"),
        "--revision": ForeignFlag(use="ORG/NAME@REVISION as MODEL"),
        "--tokenizer": ForeignFlag(why="the checkpoint's own tokenizer is used"),
        "--tokenizer-mode": ForeignFlag(why="tokenizer.json is read", same=("auto", "hf")),
        "--generation-config": ForeignFlag(why="generation_config.json gives the defaults of requests", same=("auto",)),
        "--chat-template-content-format": ForeignFlag(why="the template itself shows which it takes", same=("auto",)),
        "--hf-overrides": ForeignFlag(why="change config.json"),
        "--rope-scaling": ForeignFlag(why="config.json gives it (rope_scaling)"),
        "--seed": ForeignFlag(why="each request may have a seed"),
        "--config": ForeignFlag(use="flags, or variables PENSTOCK_..."),
        "--runner": ForeignFlag(why=_EMBEDS, same=("auto", "generate", "pooling")),
        "--task": ForeignFlag(why=_EMBEDS, same=("auto", "generate", "embed", "score", "classify")),
        "--convert": ForeignFlag(why=_EMBEDS, same=("auto", "none", "embed", "classify")),
        "--pooler-config": ForeignFlag(use="--pooling"),
        "--override-pooler-config": ForeignFlag(use="--pooling"),
        "--logits-processor-pattern": ForeignFlag(use="--logits-processors"),
        "--guided-decoding-backend": ForeignFlag(why="there is one grammar backend", same=("auto", "guidance")),
        "--limit-mm-per-prompt": ForeignFlag(use="--max-images"),
        "--allowed-media-domains": ForeignFlag(use="--image-hosts"),
        "--enable-chunked-prefill": _ON_ALREADY,
        "--enable-auto-tool-choice": _ON_ALREADY,
        "--enable-reasoning": _ON_ALREADY,
        "--async-scheduling": _ON_ALREADY,
        "--kv-transfer-config": ForeignFlag(use="--role"),
    },
    "SGLang": {
        "--enable-custom-logit-processor": ForeignFlag(use="--logits-processors"),
        "--is-embedding": ForeignFlag(why=_EMBEDS, same=("",)),
        "--lora-target-modules": ForeignFlag(why="each adapter says it", same=("all",)),
        "--lora-backend": ForeignFlag(why="there is one way to compute adapters", same=("triton", "csgmv", "chunked")),
        "--lora-eviction-policy": ForeignFlag(why="the least recently used adapter leaves its slot", same=("lru",)),
        "--ep-size": ForeignFlag(use="--enable-expert-parallel", same=("1",)),
        "--ep": ForeignFlag(use="--enable-expert-parallel", same=("1",)),
        "--enable-ep-moe": ForeignFlag(use="--enable-expert-parallel"),
        "--ep-num-redundant-experts": ForeignFlag(use="--num-redundant-experts"),
        "--init-expert-location": ForeignFlag(use="--expert-load"),
        "--disaggregation-mode": ForeignFlag(use="--role", same=("null",)),
        "--disaggregation-transfer-backend": ForeignFlag(why="the best that both engines have is chosen"),
        "--mem-fraction-static": ForeignFlag(use="--gpu-memory-utilization"),
        "--chunked-prefill-size": ForeignFlag(use="--max-num-batched-tokens"),
        "--disable-radix-cache": ForeignFlag(use="--no-enable-prefix-caching"),
        "--disable-cuda-graph": ForeignFlag(use="--enforce-eager"),
        "--schedule-policy": ForeignFlag(use="--scheduling-policy"),
        "--torchao-config": ForeignFlag(use="--quantization"),
        "--speculative-algorithm": _DRAFTS,
        "--speculative-draft-model-path": _DRAFTS,
        "--speculative-draft": _DRAFTS,
        "--speculative-num-steps": _DRAFTS,
        "--speculative-num-draft-tokens": _DRAFTS,
        "--speculative-eagle-topk": _DRAFTS,
        "--speculative-ngram-min-match-window-size": _LOOKUP,
        "--speculative-ngram-max-match-window-size": _LOOKUP,
        "--speculative-ngram-capacity": _LOOKUP,
        "--speculative-ngram-branch-length": _LOOKUP,
    },
    "TGI": {
        "--speculate": _LOOKUP,
        "--quantize": ForeignFlag(use="--quantization"),
        **TGI,
    },
    "llama.cpp": {
        "--embeddings": ForeignFlag(why=_EMBEDS, same=("",)),
        "--embd-normalize": ForeignFlag(why="modules.json in the checkpoint says it", same=("2",)),
        "--n-gpu-layers": ForeignFlag(use="--device"),
        "-ngl": ForeignFlag(use="--device"),
        "--jinja": _ON_ALREADY,
        "--model-draft": _DRAFTS,
        "-md": _DRAFTS,
        "--draft": _DRAFTS,
        "--draft-max": _DRAFTS,
        "--draft-min": _DRAFTS,
        "--spec-type": _LOOKUP,
        "--lookup-cache-dynamic": _LOOKUP,
        "-lcd": _LOOKUP,
        **LLAMA_CPP,
    },
}
"""The options of each engine."""

FOREIGN_FLAGS: Mapping[str, ForeignFlag] = {
    name: flag for engine in FLAGS_OF_ENGINES.values() for name, flag in engine.items()
}

ADAPTERS = {"--lora-modules", "--lora-paths"}
"""Names of our `--lora` whose values are several words, or JSON."""

_OTHER_VARIABLES = {"API_KEY", "FAULTS", "FAULTS_ONCE", "CACHE_DIR", "MODEL_DIR", "HTTP_ADDRESS", "IMAGE", "GPU_IMAGE"}
"""Variables that are not options: keys, faults for tests, the cache of built kernels, those of the compose files."""

_NOT_OURS = ("TEST_", "SOAK", "SERVICE_", "PORT_")
"""Prefixes of variables that tests use, and that Kubernetes sets for a service named penstock."""


def without_foreign_flags(arguments: Sequence[str]) -> list[str]:
    """Remove options that ask for what is done anyway, and replace values that have another name here.

    Raises:
        ConfigError: naming an option that asks for something else, and what to use.
    """
    left: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*left, word, *words]
        name, has_value, value = word.partition("=")
        known = name.replace("_", "-") if name.startswith("--") else name
        if known in ADAPTERS:
            left += (f"{name}={adapter}" for adapter in _adapters(name, value, words))
            continue
        flag = FOREIGN_FLAGS.get(known)
        if flag is None:
            own = VALUES.get(known, {})
            if own and not has_value and words:
                words[0] = own.get(words[0], words[0])
            left.append(f"{name}={own.get(value, value)}" if has_value else word)
            continue
        is_value = words and (words[0] in (*flag.same, *_OFF) or ("" not in flag.same and not words[0].startswith("-")))
        if is_value and not has_value:
            value = words.pop(0)
        if value not in flag.same:
            shown = f"{name} {value}".strip() if flag.same else name  # a value may be a secret, or the MODEL
            if flag.use:
                raise ConfigError(f"{shown} is an option of another engine; here, use {flag.use}")
            raise ConfigError(f"{shown} is not supported: {flag.why}")
    return left


def _adapters(name: str, value: str, words: list[str]) -> list[str]:
    """NAME=PATH of each adapter that an option has behind it; takes them from the words that follow."""
    given = [value] if value else []
    while words and not words[0].startswith("-") and ("=" in words[0] or words[0].startswith(("{", "["))):
        given.append(words.pop(0))
    if not given:
        raise ConfigError(f"{name} needs NAME=PATH")
    try:
        return [adapter for text in given for adapter in adapters_in(text)]
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from None


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that looks like an option but is not one."""
    known = {flag.variable for flag in flags()} | {ENVIRONMENT_PREFIX + name for name in _OTHER_VARIABLES}
    said = []
    for name in sorted(environment):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest == name or name in known or rest.startswith(_NOT_OURS):
            continue
        if gone := why_gone("--" + rest.lower().replace("_", "-")):
            if environment[name]:  # files for Compose have empty ones
                said.append(gone.replace("--" + rest.lower().replace("_", "-"), f"the variable {name}", 1))
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        said.append(f"the variable {name} is unknown" + (f"; did you mean {near[0]}?" if near else ""))
    return said
