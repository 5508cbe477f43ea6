"""Synthetic models that show what a step's time consists of: the engine runs them, and a fit finds each part's cost."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.lab.calibration.timed_engine import TimedEngine, TimedStep, quickest
from penstock.lab.planning.step_costs import KNOTS, Pace, StepCosts, fit
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config

_LONGEST = 1100


class Shape(NamedTuple):
    """The shape of a synthetic model."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int

    def config(self, dtype: str) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }


# All models except TINY are large enough for all threads to take part in each pass, as in models that are served.
TINY = Shape(128, 256, 1, 2, 2, 512)
"""Almost no work: shows the cost of a step as such."""
DEEP = Shape(128, 256, 24, 2, 2, 512)
"""Many layers with little work in them."""
WORDY = Shape(256, 512, 6, 16, 2, 16384)
"""Many logits, and queries that share keys."""
CACHED = Shape(256, 1024, 5, 4, 2, 512)
"""Five million weights, which fit in any processor's cache."""
STREAMED = Shape(1024, 4096, 6, 16, 4, 512)
"""91 million weights, which do not fit in a usual processor's cache."""

_RUNS: dict[Shape, Sequence[tuple[int, int, int]]] = {
    TINY: [(1, 16, 90), (4, 16, 60), (16, 16, 60), (1, 1024, 0), (8, 256, 0)],
    DEEP: [(1, 16, 60), (4, 16, 60), (16, 16, 60), (1, 1024, 60), (4, 256, 60)],
    WORDY: [(1, 16, 60), (4, 16, 60), (16, 16, 60), (1, 1024, 60), (8, 512, 40)],
    CACHED: [
        *((rows, 16, 60) for rows in (1, 2, 4, 8, 16, 32)),
        *((rows, 1024, 60) for rows in (1, 2, 4, 8)),
        (16, 64, 60),
        (16, 1024, 30),
    ],
    STREAMED: [*((rows, 16, 12) for rows in (1, 2, 4, 8, 16, 32)), (1, 1024, 12), (8, 128, 12)],
}
"""Shape -> runs: number of prompts, length of each, tokens that follow. The smallest model comes first."""
_TRIES = 3
"""Rounds of all runs, one after the other, because a shared machine may be slow for longer than a run lasts."""
_PROMPTS = (*(knot for knot in KNOTS if knot > 32), 1024)


class Probes:
    """The synthetic models, loaded. Measuring them takes a few seconds."""

    def __init__(self, dtype: str, **options: Any) -> None:
        self._dtype = dtype
        self._engines: dict[Shape, TimedEngine] = {}
        self._decoders: dict[Shape, Decoder] = {}
        self._options = options

    def load(self, shape: Shape) -> TimedEngine:
        """Load a model once for each shape."""
        if shape not in self._engines:
            config = shape.config(self._dtype)
            decoder = parse_model_config(config)
            assert isinstance(decoder, Decoder)
            self._decoders[shape] = decoder
            with _folder(config) as folder:
                self._engines[shape] = engine = TimedEngine(
                    folder,
                    load_format="dummy",
                    max_num_seqs=32,
                    max_num_batched_tokens=1024,
                    max_model_len=_LONGEST,
                    num_pages=16 * _LONGEST // 16,
                    **self._options,
                )
            engine.run(2, 16, 2)  # do all one-time work
        return self._engines[shape]

    def measure(self, cache: float, bytes_per_weight: float) -> StepCosts:
        """Run all models a few times; the shortest time of each step counts.

        Args:
            cache: bytes of the last-level cache.
            bytes_per_weight: of weights as they are stored.
        """
        prompts = [(1, length, 0) for length in _PROMPTS]
        runs = [(shape, run) for shape, its in _RUNS.items() for run in (*its, *prompts)]
        tries = [[self.load(shape).run(*run) for shape, run in runs] for _ in range(_TRIES)]
        decoders, steps = list[Decoder](), list[TimedStep]()
        for (shape, _), same in zip(runs, zip(*tries, strict=True), strict=True):
            found = [step for step in quickest(same) if _tells(step)]
            steps += found
            decoders += [self._decoders[shape]] * len(found)
        seconds = np.array([step.seconds for step in steps])
        fitted = fit(decoders, [Counter(step.chunks) for step in steps], seconds, cache / bytes_per_weight)
        return StepCosts(seconds=tuple(fitted.tolist()), cache=cache, bytes_per_weight=bytes_per_weight)

    def pace(self, costs: StepCosts) -> Pace:
        """How long steps take now, compared to these costs."""
        return Pace(self._ratio(costs, CACHED, (1, 512, 0)), self._ratio(costs, STREAMED, (1, 16, 12)))

    def _ratio(self, costs: StepCosts, shape: Shape, run: tuple[int, int, int]) -> float:
        """The ratio of measured time to expected cost, for the last step of a run."""
        step = self.load(shape).best(*run)[-1]
        return step.seconds / costs.of_step(self._decoders[shape], Counter(step.chunks))[0]


def _tells(step: TimedStep) -> bool:
    """Whether a step is useful: one with few prompt tokens shows little but the cost of new rows."""
    return all(count == 1 or count >= KNOTS[-3] for _, count in step.chunks)


@contextmanager
def _folder(config: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        yield Path(name)
