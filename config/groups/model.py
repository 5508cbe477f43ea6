"""Options: the model."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.groups.base import Options, Shown

ModelImpl = Literal["auto", "own", "transformers"]


class ModelOptions(Options, frozen=True):
    """Which checkpoint, and under which names."""

    model: Annotated[
        str,
        Meta(
            description="Checkpoint folder, GGUF file, or ORG/NAME[:FILE][@REVISION] of the Hugging Face hub. "
            "Empty: the demo model."
        ),
        Shown("MODEL", "folder, file.gguf, or ORG/NAME[:FILE][@REVISION] of the hub", ("-m", "--model-path")),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Names of the model in the API. The first one is reported."),
        Shown("NAME", "names of the model in the API", ("-a", "--alias")),
    ] = ()
    max_model_len: Annotated[
        int,
        Meta(
            description="Longest prompt plus output of one sequence, in tokens. 0: as long as the model and the "
            "KV pool allow.",
            ge=0,
        ),
        Shown(
            line="longest prompt plus output, in tokens (default: what fits)",
            also=("-c", "--ctx-size", "--context-length"),
        ),
    ] = 0
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="Code that computes the model: 'own' is Penstock's, 'transformers' that library's, which is "
            "slower but knows many more architectures. 'auto' takes its own code where it has some."
        ),
    ] = "auto"
