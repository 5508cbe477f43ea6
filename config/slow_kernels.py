"""Tells when a model is computed much more slowly than this processor could."""

FACTOR = 100
"""How many times longer a token takes by torch's kernels, measured with a small quantized model and one request."""


def slow_kernels(device: str, kernels: str) -> str:
    """A sentence if torch's kernels compute a model on a CPU; else nothing.

    Args:
        device: as a worker describes its own, such as "cpu (4 threads)".
        kernels: what computes the model.
    """
    if kernels != "torch" or not device.startswith("cpu"):
        return ""
    return (
        f"torch's kernels compute on this CPU, up to {FACTOR} times slower than native ones: --cpu-kernels chooses, "
        "and `penstock doctor` says whether there are native ones"
    )
