"""Plots a comparison: how long requests wait, and how full the pool is. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path

from penstock.config import ConfigError
from penstock.lab.simulation.figures import percentile
from penstock.lab.simulation.study import Result

_COLOURS = ("#0b6e99", "#d9822b", "#7b4fa3", "#4d8c3a", "#b5383c", "#666666", "#c2a020", "#2aa198")

_NUM_POINTS = 200  # points of a curve


def check_plot(path: Path) -> None:
    """Check before a long simulation that its plot can be drawn.

    Raises:
        ConfigError: it cannot.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: the name must end with .svg or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'penstock-llm[plan]'") from None


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Write the picture. The same results give the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(11, 7), layout="constrained")
        (ttft, tpot), (pages, waiting) = figure.subplots(2, 2)
        for number, result in enumerate(results):
            style = {"color": _COLOURS[number % len(_COLOURS)], "label": result.name}
            answered = [outcome for outcome in result.run.outcomes if not outcome.error]
            ttft.plot(*_shares([outcome.ttft for outcome in answered]), **style)
            tpot.plot(*_shares([outcome.tpot for outcome in answered if outcome.num_tokens > 1]), **style)
            at = [sample.at for sample in result.run.samples]
            pages.plot(at, [sample.num_used for sample in result.run.samples], **style)
            waiting.plot(at, [sample.num_waiting for sample in result.run.samples], **style)
        for axes, name in ((ttft, "time to first token, ms"), (tpot, "time per output token, ms")):
            axes.set(xlabel=name, ylabel="share of requests", ylim=(0, 1))
        ttft.set_xscale("log")
        pages.set(xlabel="seconds", ylabel="pages of running sequences")
        waiting.set(xlabel="seconds", ylabel="sequences that wait")
        for axes in (ttft, tpot, pages, waiting):
            axes.grid(alpha=0.3)
        ttft.legend(fontsize="small")
        figure.suptitle(title, fontsize=10)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata)


def _shares(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Milliseconds, and the share of requests that took no longer."""
    ordered, shares = sorted(seconds), [i / _NUM_POINTS for i in range(_NUM_POINTS + 1)]
    return [1e3 * percentile(ordered, share) for share in shares], shares
