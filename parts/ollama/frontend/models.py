"""Describes the served model: GET /api/tags, /api/ps, /api/version, POST /api/show.

Also answers the routes that would manage models, which this server does when it starts.
"""

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from math import prod
from typing import Any

import msgspec

from penstock.config import Config, ConfigError
from penstock.frontend.api.body import decode
from penstock.frontend.api.service import Service
from penstock.frontend.errors import ModelNotFound, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.ipc.version import VERSION
from penstock.models.finding.registry import open_model
from penstock.parts.ollama.frontend import schema
from penstock.parts.ollama.frontend.answers import HEADERS
from penstock.parts.ollama.frontend.options import served_name, shown_name

API_VERSION = "0.13.5"
"""The version of Ollama whose API this is: clients require a minimum version."""

_UNLOADED_AFTER = timedelta(days=365 * 100)
"""The model is never unloaded, but clients expect a time."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the checkpoint's files say."""

    format: str
    architecture: str
    num_parameters: int
    num_bytes: int
    quantization: str
    modified_at: str
    sizes: dict[str, int]  # by Ollama's names, without the architecture before them


async def tags(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /api/tags: all models, under each of their names."""
    facts = await _facts(service)
    models = [
        schema.OllamaModel(
            shown, shown, facts.modified_at, facts.num_bytes, _digest(service.view(name)), _details(facts)
        )
        for name, shown in zip(service.names, map(shown_name, service.names), strict=True)
    ]
    return Reply(msgspec.json.encode(schema.OllamaModels(models)))


async def running(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /api/ps: the model, if an engine is ready."""
    models: list[schema.OllamaRunningModel] = []
    told = service.engine.facts
    if told is not None:
        facts, shown = await _facts(service), shown_name(service.model.names[0])
        in_vram = 0 if told.device.lower().startswith("cpu") else facts.num_bytes
        until = (datetime.now(UTC) + _UNLOADED_AFTER).isoformat()
        models.append(
            schema.OllamaRunningModel(
                shown, shown, facts.num_bytes, _digest(service), _details(facts), until, in_vram, told.max_model_len
            )
        )
    return Reply(msgspec.json.encode(schema.OllamaRunningModels(models)))


async def show(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /api/show

    Raises:
        ModelNotFound: the model is not the served one.
    """
    request = decode(schema.SHOW, body)
    name = served_name(request.asked, service.names)
    service = service.view(name)
    facts, model = await _facts(service), service.model
    sizes = facts.sizes | ({"context_length": service.max_model_len} if service.max_model_len else {})
    info: dict[str, Any] = {
        "general.architecture": facts.architecture,
        "general.basename": name,
        "general.parameter_count": facts.num_parameters,
        **{f"{facts.architecture}.{key}": size for key, size in sizes.items()},
    }
    shown = schema.OllamaShown(
        modelfile=f"# Served by Penstock {VERSION}\nFROM {name}\n",
        parameters=_parameters(service),
        template="" if model.template is None else model.template.source,
        details=_details(facts),
        model_info=info,
        capabilities=_capabilities(service),
        modified_at=facts.modified_at,
    )
    return Reply(msgspec.json.encode(shown))


async def version(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /api/version"""
    return Reply(msgspec.json.encode(schema.OllamaVersion(API_VERSION, VERSION)))


async def pull(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """POST /api/pull: the served model is here already.

    Raises:
        ModelNotFound: the model is not the served one.
    """
    request = decode(schema.PULL, body)
    name = request.asked
    try:
        served_name(name, service.names)
    except ModelNotFound:
        raise ModelNotFound(
            f"model {str(name)[:256]!r} cannot be pulled: this server serves the model that it was started with, "
            f"{shown_name(service.model.names[0])!r}; `penstock serve ORG/NAME` downloads another one",
            param="model",
        ) from None
    statuses = ("success",) if request.stream is False else ("pulling manifest", "success")
    lines = [msgspec.json.encode(schema.OllamaStatus(status)) for status in statuses]
    if request.stream is False:
        return Reply(lines[0])
    return StreamReply(_each(lines), close=lambda: None, headers=dict(HEADERS))


async def _each(lines: list[bytes]) -> AsyncGenerator[bytes, None]:
    for line in lines:
        yield line + b"\n"


async def _refuse(what: str, service: Service, record: RequestRecord, body: bytes) -> Reply:
    raise UnsupportedParameter(
        f"{what} here: this server serves the model that it was started with; `penstock serve MODEL` serves another one"
    )


push = partial(_refuse, "models cannot be pushed")
create = partial(_refuse, "models cannot be created")
copy = partial(_refuse, "models cannot be copied (--served-model-name gives one more names)")
delete = partial(_refuse, "models cannot be deleted")
put_blob = partial(_refuse, "files of models cannot be uploaded")


# --- what the checkpoint says -----------------------------------------------------------------


async def _facts(service: Service) -> _Facts:
    """Read the facts once, in a thread: headers of large checkpoints take a moment."""
    return await service.model.tokenizer.off_loop(lambda: _read_facts(service.config))


@cache
def _read_facts(config: Config) -> _Facts:
    # Frontends need no families of models, so these are imported only for a request like this.
    from penstock.models.families.registry import expected_tensors, parse_model_config

    checkpoint = open_model(config)
    found = checkpoint.config
    parsed = None
    with suppress(ConfigError):
        parsed = parse_model_config(found)
    of_types: Counter[str] = Counter()
    num_bytes = 0
    with suppress(ConfigError, OSError):
        for tensor in checkpoint.tensors().values():
            of_types[tensor.dtype] += tensor.num_elements
            num_bytes += tensor.num_bytes
    quantization = next((name for name, _ in of_types.most_common(1)), "")
    num_parameters = of_types.total()
    if parsed is not None and parsed.quantization is not None:
        quantization = parsed.quantization.name
        num_parameters = sum(map(prod, (expected_tensors(parsed) or {}).values())) or num_parameters
    path = checkpoint.path
    at = datetime.fromtimestamp((path if path.is_file() else path / "config.json").stat().st_mtime, UTC)
    sizes = {
        "context_length": found.get("max_position_embeddings"),
        "embedding_length": found.get("hidden_size"),
        "block_count": found.get("num_hidden_layers"),
        "feed_forward_length": found.get("intermediate_size"),
        "attention.head_count": found.get("num_attention_heads"),
        "attention.head_count_kv": found.get("num_key_value_heads"),
        "vocab_size": found.get("vocab_size"),
    }
    return _Facts(
        format="gguf" if path.suffix == ".gguf" else "safetensors",
        architecture=str(found.get("model_type") or "unknown"),
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        quantization=quantization,
        modified_at=at.isoformat().replace("+00:00", "Z"),
        sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
    )


def _details(facts: _Facts) -> schema.OllamaDetails:
    size = _count(facts.num_parameters) if facts.num_parameters else ""
    return schema.OllamaDetails(facts.format, facts.architecture, [facts.architecture], size, facts.quantization)


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _digest(service: Service) -> str:
    """64 hex digits for weights, tokenizer and template; without the weights until an engine has reported them."""
    told, variant = service.engine.last_facts, service.variant
    weights = () if told is None else (told.model_fingerprint, told.weights)
    adapter = () if variant is None else (variant.adapter,)
    return hashlib.sha256("\n".join((service.model.digest, *weights, *adapter)).encode()).hexdigest()


def _capabilities(service: Service) -> list[str]:
    model = service.model
    found = ["completion"]
    if model.tool_format is not None and model.template is not None:
        found.append("tools")
    if model.infill is not None:
        found.append("insert")
    if model.reasoning_format is not None:
        found.append("thinking")
    if service.image_limits is not None:
        found.append("vision")
    if service.config.parallel.pipeline_parallel_size == 1:  # pipeline stages make no embeddings
        found.append("embedding")
    return found


def _parameters(service: Service) -> str:
    """Sampling defaults and stop texts, in the format of a Modelfile."""
    model = service.model
    lines = [f"{name:<30} {value:g}" for name, value in asdict(model.defaults).items()]
    ends = [model.tokenizer.token_text(token_id) for token_id in model.eos_token_ids]
    return "\n".join(lines + [f"{'stop':<30} {msgspec.json.encode(text).decode()}" for text in ends if text])
