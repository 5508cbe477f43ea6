"""Options: the log."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.groups.base import Options, Shown

LogFormat = Literal["auto", "console", "json"]


class LogOptions(Options, frozen=True):
    """What the processes say of themselves."""

    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        Meta(
            description="Least severe level that is logged. 'auto' is info, or warning for `penstock serve` on a "
            "terminal."
        ),
        Shown("LEVEL", "auto, debug, info, warning or error"),
    ] = "auto"
    log_format: Annotated[
        LogFormat,
        Meta(description="'console' for people, 'json' for machines. 'auto' is console on a terminal, else json."),
        Shown(line="for people, or for machines"),
    ] = "auto"
