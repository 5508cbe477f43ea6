"""Checkpoints that parts need beside the model's: they are found and checked before any process starts."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.config.options import Config
from penstock.config.parts import brought


class Finders(NamedTuple):
    """Each takes a path or a name of the hub, downloads what is missing, and returns a path.

    Raises:
        ConfigError: it is not there, and cannot be downloaded.
    """

    checkpoint: Callable[[str], str]
    adapter: Callable[[str], str]


class PartCheckpoints:
    """Listed as `PARTS` in a part's `checkpoints`. It overrides the methods that it needs."""

    @classmethod
    def located(cls, config: Config, find: Finders) -> Config:
        """Replace the names of checkpoints in the part's options by their paths.

        Raises:
            ConfigError: from a finder; the message names the option.
        """
        return config

    @classmethod
    def check(cls, config: Config, *, with_weights: bool, with_tokenizer: bool) -> None:
        """Check that they can work with the model.

        Raises:
            ConfigError: one clear sentence.
        """


def locate_further(config: Config, find: Finders) -> Config:
    """See `PartCheckpoints.located`."""
    for kind in brought("checkpoints", PartCheckpoints):
        config = kind.located(config, find)
    return config


def check_further(config: Config, *, with_weights: bool = True, with_tokenizer: bool = True) -> None:
    """See `PartCheckpoints.check`."""
    for kind in brought("checkpoints", PartCheckpoints):
        kind.check(config, with_weights=with_weights, with_tokenizer=with_tokenizer)
