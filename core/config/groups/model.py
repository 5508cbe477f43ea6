"""Options: the model."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.core.config.groups.base import Options

ModelImpl = Literal["auto", "own", "transformers"]


class ModelOptions(Options, frozen=True):
    """Which checkpoint, and under which names."""

    model: Annotated[
        str,
        Meta(description="Checkpoint folder, or ORG/NAME[@REVISION] of the Hugging Face hub. Empty: the demo model."),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="Names of the model in the API. The first one is reported.")
    ] = ()
    max_model_len: Annotated[
        int,
        Meta(
            description="Longest prompt plus output of one sequence, in tokens. 0: as long as the model and the "
            "KV pool allow.",
            ge=0,
        ),
    ] = 0
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="Code that computes the model: 'own' is Penstock's, 'transformers' that library's, which is "
            "slower but knows many more architectures. 'auto' takes its own code where it has some."
        ),
    ] = "auto"
