"""All cases. A family's options are in a module of its own."""

from tests.gpu_worker.families import dense, gemma, gpt_oss, llama4, minimax, mixtral, phi, qwen_moe
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
}
"""By model type and option."""
