"""A draft model with its CUDA branches and graphs."""

import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.core.steps.drafts import DraftOutcome
from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.faults.soak import only_in_soak
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds
from tests.parts.drafts.lengths import drafting_of

PROMPTS = prompts((30, 5), seed=2)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SAMPLING = (GREEDY, replace(GREEDY, temperature=0.9, top_p=0.9, seed=3))


class Lengths(FixedLengths):
    """Counts what was right."""

    num_guessed = num_right = 0

    def note(self, outcome: DraftOutcome) -> None:
        self.num_guessed += sum(outcome.num_guessed)
        self.num_right += sum(max(0, count - 1) for count in outcome.num_tokens)


@only_in_soak  # by default heads, which guess through the same branches, show it
def test_tokens_are_those_of_the_cpu(checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)
    folder, _ = checkpoint("qwen2-some-windows")
    options = schedule(24, 16, 1, num_tokens=200) | {"max_num_seqs": 4}
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    device = use_fake_cuda(monkeypatch)
    speculative = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})
    engine = Engine(folder, device="cuda", speculative_config=speculative, **options)
    lengths = drafting_of(engine.scheduler).lengths = Lengths(2)
    assert engine.run(PROMPTS, SAMPLING) == expected
    assert lengths.num_guessed >= 4
    assert lengths.num_right >= 0.9 * lengths.num_guessed
    assert device.num_replays > 0


def test_warm_up_meets_what_it_launches(checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that guessing launches afterwards would be compiled anew."""
    folder, _ = checkpoint("llama")
    draft, _ = checkpoint("llama-mqa-biases", num_hidden_layers=1)
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # without running the kernels
    options = schedule(100, 16, 1, num_tokens=3000, cached=True)
    speculative = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2})
    engine = Engine(folder, device="cuda", max_num_seqs=6, speculative_config=speculative, **options)
    drafting_of(engine.scheduler).lengths = Lengths(2)
    known = dict(kinds)
    kinds.clear()
    engine.run(prompts((1, 2, 5, 17, 90, 150, 300, 40, 64), seed=3), GREEDY)
    assert kinds
    new = [kind for kind in kinds if kind not in known]
    assert not new, "\n".join(new)
