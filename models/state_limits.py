"""Sizes and unsupported options of models with layers that keep a state of each row."""

from collections.abc import Iterator

from penstock.config.options import Config, ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.description.encoder import Encoder
from penstock.models.description.model_config import ModelConfig

_GIB = 1 << 30
_MANY_PAGES = 1 << 19


def num_snapshots(config: Config, state_bytes: int, num_pages: int) -> int:
    """Return how many snapshots fit in `--state-snapshots-gib`; each belongs to a page. 0 without states."""
    if not state_bytes or not config.scheduler.enable_prefix_caching:
        return 0
    return min(int(config.worker.state_snapshots_gib * _GIB) // state_bytes, num_pages)


def num_empty_pages(config: Config, max_model_len: int) -> int:
    """Return the size of a pool of empty pages, if no layer has keys: pages still cost the scheduler some bytes.

    It is twice as many as all rows can use, up to a limit that long rows may exceed.
    """
    most = -(-max_model_len // config.scheduler.page_size)
    return max(most, min(2 * config.scheduler.max_num_seqs * most, _MANY_PAGES))


def check_states(model: ModelConfig, config: Config) -> None:
    """Refuse options that need a model without states, or one that keeps something in pages.

    Raises:
        ConfigError: with the option, and the reason.
    """
    if isinstance(model, Encoder) and (found := next(_refused(config), None)) is not None:
        raise ConfigError(f"{found[0]}: {model.architecture} is an encoder, which keeps nothing and draws no tokens")
    if isinstance(model, Decoder) and model.state_layers and (found := next(_refused(config), None)) is not None:
        option, why = found
        raise ConfigError(f"{option}: layers of {model.architecture} keep a state of each row, {why}")


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    yield from filter(None, (options.problem_with_states() for options in config.of_parts()))
