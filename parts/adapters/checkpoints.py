"""Where the adapters of `--lora` are."""

from msgspec.structs import replace

from penstock.config.options import Config, ConfigError
from penstock.models.part import Finders, PartCheckpoints
from penstock.parts.adapters.options import AdapterOptions


class AdapterCheckpoints(PartCheckpoints):
    """Adapters may have names of the hub."""

    @classmethod
    def located(cls, config: Config, find: Finders) -> Config:
        options = config.of(AdapterOptions)
        found = []
        for name, path in options.adapters.items():
            try:
                found.append(f"{name}={find.adapter(path)}")
            except ConfigError as error:
                raise ConfigError(f"--lora {name}={path}: {error}") from None
        return config.with_options(replace(options, lora=tuple(found))) if found else config


PARTS = (AdapterCheckpoints,)
