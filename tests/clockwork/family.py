"""A model for tests whose tokens show whether pages and rows are handled correctly: `tests/clockwork/model.py`.

config.json     {"architectures": ["ClockworkForCausalLM"], "step_seconds": 0.05, "token_seconds": 0.0, ...}

All processes of a server know it if `PENSTOCK_TEST_MODELS` names this module.
"""

from penstock.models.description.model_config import KVShape, ModelConfig
from penstock.models.parsing.family import Family
from penstock.models.parsing.json_fields import JsonFields


class ClockworkConfig(ModelConfig, frozen=True, kw_only=True):
    """The model has one layer with one head of two numbers, of which it uses one."""

    step_seconds: float  # duration of a step
    token_seconds: float  # additional duration for each of its tokens

    @property
    def kv(self) -> tuple[KVShape, ...]:
        return (KVShape(1, 2, 2, None),)


def parse(architecture: str, fields: JsonFields) -> ClockworkConfig:
    """As `Family.parse`."""
    return ClockworkConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        max_model_len=fields.whole("max_position_embeddings"),
        checkpoint_dtype="float32",
        step_seconds=fields.number("step_seconds", 0.0),
        token_seconds=fields.number("token_seconds", 0.0),
    )


CLOCKWORK = Family(
    architectures=("ClockworkForCausalLM",),
    parse=parse,
    tensors=lambda config: {},
    matrices=lambda config: {},
    ignores=lambda name, config: False,
    known_as=str,
    build="tests.clockwork.model:build",
)
FAMILIES = (CLOCKWORK,)
