"""The application's arguments (`args` in Serve's YAML, NAME=VALUE after `serve run`), and the plan that they make.

args                 options of `penstock serve`, without the leading dashes, and the settings below
args: {models: […]}  several models, each with its own options and settings, which override those beside `models`
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.config import Config, ConfigError
from penstock.config.flags import config_from, flags
from penstock.config.parser import unknown_flag
from penstock.models.finding.registry import served_model_names

_NOT_OURS = {
    "ipc": {"frontend_address", "worker_address", "rendezvous_address", "runtime_dir", "channel_key_file"},
    "frontend": {"host", "port", "admin_port", "num_frontends", "tls_certificate", "tls_key"},
    "parallel": {"data_parallel_size"},
    "handover": {"role"},
}
"""Options without effect here: Serve has the HTTP server and the number of engines, and addresses are chosen."""

_REPLICAS = "engines are replicas here, each for itself: use min_engines and max_engines"
_WHY = {
    "frontend": "Ray Serve has the HTTP server: see its http_options",
    "parallel": _REPLICAS,
    "handover": _REPLICAS,
    "ipc": "the application chooses addresses and keys itself",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one model is spread over the cluster."""

    min_engines: Annotated[int, Meta(ge=1)] = 1  # not 0, because only engines report the load
    max_engines: Annotated[int, Meta(ge=0)] = 0  # 0: as many as min_engines
    target_waiting_tokens: Annotated[int, Meta(ge=1)] = 4096  # if more wait per engine, one more is started
    upscale_delay: Annotated[float, Meta(ge=0.0)] = 5.0  # seconds for which more engines must be needed
    downscale_delay: Annotated[float, Meta(ge=0.0)] = 300.0  # seconds for which fewer engines must suffice
    num_frontends: Annotated[int, Meta(ge=1)] = 1  # replicas of the ingress; only beside `models`, not in it
    cpus_per_engine: Annotated[float, Meta(ge=0.0)] = 1.0  # for its scheduler, and its worker on a CPU

    @property
    def most_engines(self) -> int:
        """The upper bound of engines."""
        return max(self.max_engines, self.min_engines)


class ModelPlan(msgspec.Struct, frozen=True):
    """One model of the application."""

    name: str
    config: Config
    settings: Settings


def read_args(args: Mapping[str, Any]) -> list[ModelPlan]:
    """The models that these arguments ask for.

    Raises:
        ConfigError: in one sentence, with the name of an argument that is unknown, out of bounds or without effect.
    """
    given = dict(args)
    models = given.pop("models", None)
    if models is None:
        return [_plan(given)]
    if not isinstance(models, list) or not models or not all(isinstance(each, Mapping) for each in models):
        raise ConfigError("models must be a list of models, each with its own arguments")
    if any("num_frontends" in each for each in models):
        raise ConfigError("num_frontends is one for all models: give it beside `models`")
    plans = [_plan(given | dict(each)) for each in models]
    names = [name for plan in plans for name in served_model_names(plan.config)]
    if len(set(names)) < len(names):
        raise ConfigError(f"models need names of their own (served_model_name), got {', '.join(names)}")
    return plans


def _plan(given: dict[str, Any]) -> ModelPlan:
    own = {name: given.pop(name) for name in Settings.__struct_fields__ if name in given}
    try:
        settings = msgspec.convert(own, Settings, strict=False)  # NAME=VALUE has only strings
    except msgspec.ValidationError as error:
        raise ConfigError(f"{', '.join(own)}: {error}") from None
    if 0 < settings.max_engines < settings.min_engines:
        raise ConfigError(f"max_engines ({settings.max_engines}) is less than min_engines ({settings.min_engines})")
    config = _config(given)
    return ModelPlan(served_model_names(config)[0], config, settings)


def _config(options: dict[str, Any]) -> Config:
    """The options. Several ranks are in a placement group over nodes unless `launcher` is 'local': then on one node."""
    known = {flag.field: flag.group for flag in flags()}
    for name in options:
        if name not in known:
            ours = ["--" + each.replace("_", "-") for each in (*known, *Settings.__struct_fields__)]
            raise ConfigError(unknown_flag("--" + name.replace("_", "-"), ours))
        if name in _NOT_OURS.get(known[name], ()):
            raise ConfigError(f"{name} has no effect on Ray Serve: {_WHY[known[name]]}")
    num_ranks = config_from(Namespace(**options), {}).parallel.num_ranks
    return config_from(Namespace(**({"launcher": "ray"} if num_ranks > 1 else {}) | options), {})
