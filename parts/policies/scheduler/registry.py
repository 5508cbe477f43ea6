"""The policies by name. Your own can be added: an installed package by an entry point, any module by its name.

[project.entry-points."penstock.policies"]
lifo = "my_package.policies:Lifo"
"""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from types import ModuleType

from penstock.config import ConfigError
from penstock.parts.policies.options import FCFS
from penstock.parts.policies.scheduler.cache_aware import CacheAware
from penstock.parts.policies.scheduler.deadline import Deadline, DeadlineOrRefuse
from penstock.parts.policies.scheduler.fair import Fair
from penstock.parts.policies.scheduler.hrrn import HighestResponseRatioNext
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.priority import Priority
from penstock.parts.policies.scheduler.sjf import ShortestJobFirst

ENTRY_POINTS = "penstock.policies"

POLICIES: dict[str, Callable[[], Policy]] = {
    FCFS: Policy,
    "priority": Priority,
    "sjf": ShortestJobFirst,
    "hrrn": HighestResponseRatioNext,
    "cache-aware": CacheAware,
    "fair": Fair,
    "deadline": Deadline,
    "deadline-refuse": DeadlineOrRefuse,
}


def make_policy(name: str) -> Policy:
    """Return a new policy: one of POLICIES, of an entry point, or of the class that `MODULE:CLASS` names.

    The module may lie in the current folder.

    Raises:
        ConfigError: if there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        if module and attribute:
            found = getattr(_imported(module), attribute)
        else:
            found = next((entry.load() for entry in entry_points(group=ENTRY_POINTS, name=name)), None)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--scheduling-policy {name}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(
            f"--scheduling-policy must be {', '.join(POLICIES)} or MODULE:CLASS of a Policy, got {name!r}"
        )
    return found()


def _imported(name: str) -> ModuleType:
    """Import a module, which may lie in the current folder: the installed command does not look there."""
    with suppress(FileNotFoundError):  # the folder may have been removed
        here = os.getcwd()
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # last, so that it hides nothing
    return importlib.import_module(name)
