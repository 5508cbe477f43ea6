"""Options: several workers, and several engines."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Options, Shown


class ParallelOptions(Options, frozen=True):
    """How a model is spread over workers, and how many copies of it serve."""

    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="Workers that share each layer: every one holds a part of its matrices and of its KV heads.",
            ge=1,
            le=1024,
        ),
        Shown(line="workers that share each layer", also=("-tp", "--tp", "--tp-size")),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            description="Stages, each with a range of the layers, that work on different requests at a time.",
            ge=1,
            le=1024,
        ),
        Shown(line="stages with a part of the layers each", also=("-pp", "--pp", "--pp-size")),
    ] = 1
    pipeline_layers: Annotated[
        str,
        Meta(
            description="How many layers each stage has, such as '10,12'. Empty: balanced by the estimated time of "
            "each stage, the last one's with the output matrix."
        ),
        INTERNAL,
    ] = ""
    data_parallel_size: Annotated[
        int,
        Meta(description="Engines behind one server, each with the whole model.", ge=1, le=1024),
        Shown(line="engines behind one server, each with the whole model", also=("-dp", "--dp", "--dp-size")),
    ] = 1
    launcher: Annotated[
        Literal["local", "ray"],
        Meta(
            description="Where workers are started: 'local' is this machine; 'ray' is a Ray cluster (RAY_ADDRESS, or "
            "the one that this machine is a node of), with --num-threads processors and a GPU for each worker. Needs "
            "`pip install 'penstock-llm[ray]'`."
        ),
        Shown(line="where workers are started"),
    ] = "local"
    check_ranks: Annotated[
        bool,
        Meta(
            description="For debugging: compare the tokens that tensor-parallel workers draw, at each step, and stop "
            "them if they differ. Takes one more exchange a step."
        ),
        INTERNAL,
    ] = False
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Spread whole experts over the --tensor-parallel-size workers of a stage, instead of a part of "
            "each expert. Attention and shared experts are split as before."
        ),
        Shown(line="whole experts on each worker of a stage"),
    ] = False
    num_redundant_experts: Annotated[
        int,
        Meta(
            description="Further copies of experts in each layer, for those that most tokens go to. Needs "
            "--enable-expert-parallel.",
            ge=0,
            le=65536,
        ),
    ] = 0
    expert_load: Annotated[
        str,
        Meta(
            description="File with the tokens that went to each expert, as GET /debug/expert_load answers: experts are "
            "placed, and copied, so that workers have equally many. Empty: they are taken as equal."
        ),
        Shown("PATH"),
    ] = ""
    expert_exchange: Annotated[
        Literal["auto", "all-reduce", "all-to-all"],
        Meta(
            description="Communication of expert parallelism. 'all-reduce': every worker has all tokens "
            "anyway, computes what its own experts make of them, and the results are added up. 'all-to-all': a worker "
            "routes its share of the tokens and sends each to the workers that need it. 'auto': by the estimated bytes."
        ),
        INTERNAL,
    ] = "auto"

    @property
    def num_ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
