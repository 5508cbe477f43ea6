"""All cases. A family's options are in a module of its own."""

from tests.gpu_worker.families import (
    cohere,
    dense,
    gemma,
    glm,
    gpt_oss,
    granite,
    latent,
    llama4,
    llama_like,
    minimax,
    mixtral,
    olmo,
    parallel,
    phi,
    positions,
    qwen_moe,
    recurrent,
)
from tests.gpu_worker.families.case import Case

CASES: dict[str, Case] = {
    **dense.CASES,
    **gpt_oss.CASES,
    **qwen_moe.CASES,
    **gemma.CASES,
    **mixtral.CASES,
    **phi.CASES,
    **llama4.CASES,
    **minimax.CASES,
    **glm.CASES,
    **olmo.CASES,
    **granite.CASES,
    **cohere.CASES,
    **llama_like.CASES,
    **parallel.CASES,
    **positions.CASES,
    **latent.CASES,
    **recurrent.CASES,
}
"""By model type and option."""
