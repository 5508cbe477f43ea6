"""What layers that keep a state of each row mean for sizes, and what does not work with them."""

from collections.abc import Iterator

from penstock.core.checkpoint.decoder import Decoder
from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.config.options import Config, ConfigError

_GIB = 1 << 30
_MANY_PAGES = 1 << 19


def num_snapshots(config: Config, state_bytes: int, num_pages: int) -> int:
    """How many snapshots `--state-snapshots-gib` has room for, each of which belongs to a page; 0 without states."""
    if not state_bytes or not config.scheduler.enable_prefix_caching:
        return 0
    return min(int(config.worker.state_snapshots_gib * _GIB) // state_bytes, num_pages)


def num_empty_pages(config: Config, max_model_len: int) -> int:
    """How many pages a pool has if they hold nothing, as no layer has keys: they still cost the scheduler some bytes.

    As many as all rows can use and as many again, up to a limit that long rows may exceed.
    """
    most = -(-max_model_len // config.scheduler.page_size)
    return max(most, min(2 * config.scheduler.max_num_seqs * most, _MANY_PAGES))


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
