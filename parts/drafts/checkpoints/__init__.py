"""The checkpoints of drafters: draft models, and heads that get a model's hidden states."""

import msgspec
from msgspec.structs import replace

from penstock.config.options import Config, ConfigError
from penstock.models.part import Finders, PartCheckpoints
from penstock.parts.drafts.options import DraftOptions


class DraftCheckpoints(PartCheckpoints):
    """A draft model has a name like any model's; a head is looked up where it is read."""

    @classmethod
    def located(cls, config: Config, find: Finders) -> Config:
        options = config.of(DraftOptions)
        speculative = options.speculative
        if speculative is None or speculative.method != "draft_model":
            return config
        try:
            path = find.checkpoint(speculative.model)
        except ConfigError as error:
            raise ConfigError(f"--speculative-config: {error}") from None
        text = msgspec.json.encode(replace(speculative, model=path)).decode()
        return config.with_options(replace(options, speculative_config=text))

    @classmethod
    def check(cls, config: Config, *, with_weights: bool, with_tokenizer: bool) -> None:
        if config.of(DraftOptions).speculative_config:
            from penstock.parts.drafts.checkpoints.check import check_drafter  # few need it

            check_drafter(config, with_weights=with_weights, with_tokenizer=with_tokenizer)


PARTS = (DraftCheckpoints,)
