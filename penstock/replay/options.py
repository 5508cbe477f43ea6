"""The options of a replay: those of the recording, overridden by given ones and by those that a replay needs."""

from argparse import Namespace

from penstock.config import Config, ConfigError
from penstock.config.flags import config_from, fields
from penstock.parts.recording.reader import Run

GROUPS = ("model", "scheduler", "worker", "log")

_NEUTRAL = {
    "step_trace": "",
    "record": "",
    "record_prompts": False,
    "profile": "",
    "spare_worker": False,
    "disk_kv": "",  # the folder may be in use
    "max_num_queued_seqs": 1 << 30,  # so that no request is refused that was accepted before
    "max_num_queued_tokens": 1 << 40,
    "queue_patience": 0.0,
    "queue_timeout": 0.0,
}
"""Options of the recording that a replay does not use."""


def replay_config(run: Run, given: Namespace) -> Config:
    """The run's options, overridden by those that are `given`.

    Raises:
        ConfigError: an option cannot work, or the run has computed nothing.
    """
    names = {flag.field for flag in fields(GROUPS)}
    recorded = {name: value for group in run.header.options.values() for name, value in group.items() if name in names}
    hello = run.hello()
    sizes = {"num_pages": hello.num_pages, "page_size": hello.page_size}
    sizes |= {"max_num_seqs": hello.max_num_seqs, "max_num_batched_tokens": hello.max_num_batched_tokens}
    if "model" not in given:  # a different model may have a different limit
        sizes["max_model_len"] = hello.max_model_len
    neutral = {name: value for name, value in _NEUTRAL.items() if name in names}
    asked = {name: value for name, value in vars(given).items() if name in names}
    if surplus := neutral.keys() & asked.keys():
        raise ConfigError(f"--{min(surplus).replace('_', '-')} has no effect on a replay")
    return config_from(Namespace(**(recorded | sizes | neutral | asked)), {})


def check_plans(run: Run) -> None:
    """
    Raises:
        ConfigError: the plans of this run cannot be computed again.
    """
    if not run.header.has_tokens:
        raise ConfigError("--plans needs the tokens of prompts and outputs: record with --record-prompts")
    if not run.is_whole:
        raise ConfigError(
            "--plans needs a run from its beginning, because pages hold what earlier steps computed: the oldest lines "
            "of this one were dropped (--record FILE:MIB keeps more)"
        )
    if any(group.get("disk_kv") for group in run.header.options.values()):
        raise ConfigError("--plans cannot know what the disk tier of this run held")
    if len({(worker.hello["num_pages"], worker.hello["max_num_seqs"]) for worker in run.workers}) > 1:
        raise ConfigError("--plans needs workers of one size, and those of this run differ")
