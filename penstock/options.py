"""From keyword arguments to a configuration: the options of `penstock serve`, checked by the same code."""

import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import structlog

from penstock.config import Config, ConfigError
from penstock.config.flags import config_from, fields, flags
from penstock.config.foreign_flags import FOREIGN_FLAGS
from penstock.config.parser import unknown_flag
from penstock.config.part_options import part_options

_OF_FRONTENDS = ("chat_template", "parse_special_tokens", "max_n", "strict_requests", "price_per_hour")
"""Options of the HTTP side that concern texts and requests, and so have an effect without HTTP."""

_APART_ONLY = frozenset(
    (
        "queue_patience",
        "queue_timeout",
        "profile",
        "min_prefill_tokens",
        "log_format",
    )
)
"""Options of separate processes, without effect on an engine in the caller's process."""


def apart_only() -> frozenset[str]:
    """Options that have no effect on an engine in the caller's process."""
    return _APART_ONLY.union(*(options.apart_only for options in part_options().values()))


def config_of(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration of these options; `PENSTOCK_*` variables supply options that are not given.

    Raises:
        ConfigError: naming the option, its value and the bound that it breaks.
    """
    of_groups = [flag.field for flag in fields(("model", "scheduler", "worker", "parallel", "log"))]
    known = {*of_groups, *_OF_FRONTENDS} - {"spare_worker", "launcher"}
    options = {name: value for name, value in options.items() if name in known or not _is_done_anyway(name, value)}
    for name in options:
        if name not in known:
            if any(flag.field == name for flag in flags()):
                raise ConfigError(f"{name} is an option of `penstock serve` that has no effect here")
            raise _in_python(unknown_flag("--" + name.replace("_", "-"), ["--" + k.replace("_", "-") for k in known]))
    variables = {flag.variable: environment.get(flag.variable, "") for flag in flags() if flag.field in known}
    # As in vLLM, options that are JSON may be given as what it says.
    options = {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    try:
        return config_from(Namespace(**options), variables)
    except ConfigError as error:
        raise _in_python(str(error)) from None


def _is_done_anyway(name: str, value: Any) -> bool:
    """Whether another engine's option asks for nothing else than what is done, as `enable_lora=True` of vLLM."""
    flag = FOREIGN_FLAGS.get("--" + name.replace("_", "-"))
    return flag is not None and str(value) in flag.same


def _in_python(sentence: str) -> ConfigError:
    """The error message of the command line, with options spelled as keyword arguments."""
    return ConfigError(re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), sentence))


def quiet(level: str) -> None:
    """Log from this level on (`auto`: warnings) to stderr, if logging was not configured already."""
    if not structlog.is_configured():
        least = logging.WARNING if level == "auto" else getattr(logging, level.upper())
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(least),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
