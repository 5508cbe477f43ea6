"""Options, shared by all processes."""

from penstock.config.options import (
    Config,
    ConfigError,
    FrontendOptions,
    IpcOptions,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    WorkerOptions,
    channel_keys,
    validate,
)

__all__ = [
    "Config",
    "ConfigError",
    "FrontendOptions",
    "IpcOptions",
    "LogOptions",
    "ModelOptions",
    "ParallelOptions",
    "SchedulerOptions",
    "WorkerOptions",
    "channel_keys",
    "validate",
]
