"""Dynamic temperature: the more even the distribution, the higher the temperature."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class DynamicTemperature(Sampler):
    """Divides by low + (high - low) (entropy / largest possible entropy)^exponent, in place of the temperature."""

    name = "dynamic_temperature"
    others = ("dynatemp",)
    replaces = "temperature"
    heats = True
    parameters = (
        Parameter("dynatemp_range", 0.0, 0.0, 100.0, help="from temperature minus this to temperature plus this"),
        Parameter(
            *("dynatemp_exponent", 1.0, 0.01, 100.0),
            help="of the normalised entropy",
            synonyms=("dynatemp_exp",),
        ),
        Parameter("dynamic_temperature", False, help="use dynatemp_low and dynatemp_high"),
        Parameter("dynatemp_low", 1.0, 0.0, 100.0, help="the lowest temperature", synonyms=("min_temp",)),
        Parameter("dynatemp_high", 1.0, 0.0, 100.0, help="the highest temperature", synonyms=("max_temp",)),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        spread, exponent = given["dynatemp_range"], given["dynatemp_exponent"]
        if given["dynamic_temperature"]:
            return (given["dynatemp_low"], given["dynatemp_high"], exponent)
        if spread > 0:
            return (max(0.0, given["temperature"] - spread), given["temperature"] + spread, exponent)
        return None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        low, high, exponent = values
        logp = z.log_softmax(-1)
        entropy = -(logp.exp() * logp).nansum()
        most = z.isfinite().sum().clamp(min=2).log()
        temperature = low + (high - low) * (entropy / most).clamp(0, 1) ** exponent
        return z / temperature.clamp(min=1e-4)
