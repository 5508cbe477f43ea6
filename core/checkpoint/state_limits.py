"""What does not work with layers that keep a state of each row: refused before any process starts."""

from collections.abc import Iterator

from penstock.core.checkpoint.decoder import Decoder
from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.config.options import Config, ConfigError


def check_states(model: ModelConfig, config: Config) -> None:
    """Refuse options that pages of keys and values alone would allow.

    Raises:
        ConfigError: with the option, and the reason.
    """
    if isinstance(model, Decoder) and model.state_layers and (found := next(_refused(config), None)) is not None:
        option, why = found
        raise ConfigError(f"{option}: layers of {model.architecture} keep a state of each row, {why}")


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    if config.worker.speculative_config:
        yield "--speculative-config", "which cannot go back behind wrong guesses"
    if config.worker.host_kv_gib:
        yield "--host-kv-gib", "which has no lower tier: pages alone are no start"
    if config.worker.disk_kv:
        yield "--disk-kv", "which has no lower tier: pages alone are no start"
    if config.parallel.role:
        yield "--role", "which is not handed over: pages alone are no start"
