"""Plots a plan: the machine's roofline with the model's steps on it, and latency against throughput."""

import importlib.util
from pathlib import Path

from penstock.config.options import ConfigError
from penstock.lab.planning.plan import Plan

_MOST_BATCH = 512
_COLORS = ("#0b6e99", "#d9730d")


def draw(plan: Plan, context: int, target: Path) -> None:
    """Write the picture, in the format of the file's name (.svg, .png, .pdf).

    Args:
        plan: whose steps are drawn.
        context: tokens of each sequence.
        target: the file.

    Raises:
        ConfigError: matplotlib is missing, or cannot write this format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'penstock-llm[plan]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    costs, machine = plan.costs, plan.machine
    most = max(1, min(plan.max_batch(context), _MOST_BATCH))
    batches = sorted({1 << i for i in range(most.bit_length())} | {most})
    steps = [plan.decode_step(batch, context) for batch in batches]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        roof, pace = figure.subplots(1, 2)
        intensities, rates = [], []
        for batch, step in zip(batches, steps, strict=True):
            operations = costs.operations({(context - 1, 1): batch})
            intensities.append(operations / (costs.weight_bytes_read(batch) + batch * costs.kv_bytes(context)))
            rates.append(operations / step.seconds / plan.layout.tp)
        prompt = min(context, 2048)
        operations = costs.operations({(0, prompt): 1})
        of_prompt = operations / (costs.weight_bytes_read(prompt) + costs.kv_bytes(prompt))
        peak = machine.rate(costs.weights)
        ridge = peak / machine.bandwidth
        ends = [min(*intensities, ridge) / 2, ridge, max(of_prompt, ridge) * 2]
        roof.loglog(ends, [min(peak, at * machine.bandwidth) / 1e12 for at in ends], color="#777777")
        roof.loglog(intensities, [rate / 1e12 for rate in rates], "o-", color=_COLORS[0], label="decode, by batch")
        prompt_rate = operations / plan.prefill(prompt).seconds / plan.layout.tp
        roof.loglog([of_prompt], [prompt_rate / 1e12], "s", color=_COLORS[1], label=f"prefill of {prompt:,} tokens")
        roof.set(xlabel="operations per byte", ylabel="TFLOP/s of a device", title=machine.name)
        roof.legend()
        throughput = [plan.tokens_per_second(batch, context) for batch in batches]
        milliseconds = [1e3 * plan.decode_step(max(1, batch // plan.layout.pp), context).seconds for batch in batches]
        pace.plot(throughput, milliseconds, "o-", color=_COLORS[0])
        for batch, x, y in zip(batches, throughput, milliseconds, strict=True):
            pace.annotate(str(batch), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        pace.set(
            xlabel="tokens per second",
            ylabel="milliseconds per token",
            title=f"{costs.decoder.architecture}, {costs.weights}, {context:,} tokens each; batch at the points",
        )
        pace.set_ylim(bottom=0)
        pace.title.set_fontsize(9)
        for axes in (roof, pace):
            axes.grid(alpha=0.3)
        try:
            figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
        except ValueError as error:
            raise ConfigError(f"--plot {target}: {error}") from None
