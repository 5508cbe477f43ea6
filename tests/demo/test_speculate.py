"""Training of drafters, at a scale of seconds: they learn, and the engine loads them and guesses the same."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from penstock.demo.evaluate import MAX_NEW_TOKENS, MODEL_DIR
from penstock.demo.speculate.answers import Batch, Text, batches, held_out_texts, training_texts
from penstock.demo.speculate.draft import DraftTraining
from penstock.demo.speculate.head import Head, HeadTraining, head_config
from penstock.demo.speculate.target import Target
from penstock.demo.speculate.training import Acceptance, acceptance, count_right, train
from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.checkpoints.check import check_drafter
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from penstock.parts.drafts.worker.drafter import Guesses, Int32Array
from penstock.parts.drafts.worker.guarded import Guarded
from tests.gpu_worker.engine_in_process import Engine, make_config
from tests.parts.drafts.drafters import drafter_of
from tests.parts.drafts.lengths import drafting_of

NUM_GUESSED = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(MODEL_DIR)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    return found


@pytest.fixture(scope="module")
def texts(tokenizer: PreTrainedTokenizerFast) -> tuple[list[Text], list[Text]]:
    asked = MODEL_DIR, tokenizer, 5
    return training_texts(*asked, 64, 1), held_out_texts(*asked, 8, 1)


@pytest.fixture(scope="module")
def head(target: Target, texts: tuple[list[Text], list[Text]]) -> HeadTraining:
    trainee = HeadTraining(target, 256, list(range(target.config.vocab_size)), 0)
    train(trainee, batches(texts[0], 512, target, 0), 30, 4e-3, "head")
    return trainee


def test_texts_end_with_answers_of_the_model(
    texts: tuple[list[Text], list[Text]], tokenizer: PreTrainedTokenizerFast
) -> None:
    for text in texts[1]:
        shown = str(tokenizer.decode(text.token_ids))
        said = str(tokenizer.decode([token for token, is_said in zip(*text, strict=True) if is_said]))
        assert shown.startswith("<|im_start|>user\n")
        assert shown.endswith("<|im_end|>")
        assert said.endswith("<|im_end|>")
        assert "<|im_start|>" not in said


def test_steps_count_as_an_engine_takes_them() -> None:
    #       0  1  2  3  4  5  6  7: the answer begins at 1, and the prefill draws its first token
    right = [
        [0, 0, 1, 1, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 0, 1],
    ]
    found = count_right(Acceptance.none(2), torch.tensor(right).bool().tolist(), 1, 8)
    # guesses for 2, 3 are right, and 4 follows; for 5, then not for 6, which follows; 7 is right, and the end
    assert found == Acceptance([3, 2], [3, 1], 3, 6)
    assert found.tokens_per_step == 2


def test_unrolled_steps_are_those_of_a_chain(target: Target) -> None:
    """A chain of guesses goes on from the model's features up to a position with its own ones."""
    torch.manual_seed(1)
    head = Head(head_config(target.config, 32))
    embedded, features = torch.randn(2, 1, 7, 256).unbind()
    with torch.no_grad():
        made = head.unrolled(embedded, features, 3)
        for last in range(4):
            known = features[:, : last + 1]
            for step in range(3):
                out = head.unrolled(embedded[:, : known.shape[1]], known, 1)[0][:, -1:]
                torch.testing.assert_close(made[step][:, last + step], out[:, 0], atol=1e-4, rtol=1e-4)
                known = torch.cat((known, out), 1)


def test_a_short_training_guesses_better_than_chance(
    head: HeadTraining, target: Target, texts: tuple[list[Text], list[Text]]
) -> None:
    unseen = [Batch.of(texts[1], target)]
    before = acceptance(HeadTraining(target, 256, list(range(target.config.vocab_size)), 0), unseen, NUM_GUESSED)
    after = acceptance(head, unseen, NUM_GUESSED)
    assert before.shares[0] < 0.02
    assert after.shares[0] > 0.1
    assert after.tokens_per_step > 1.1


def test_a_draft_model_learns(
    target: Target, tokenizer: PreTrainedTokenizerFast, texts: tuple[list[Text], list[Text]], tmp_path: Path
) -> None:
    trainee = DraftTraining(target, tokenizer, 64, 1, 0)
    train(trainee, batches(texts[0], 256, target, 0), 16, 8e-3, "draft")
    assert acceptance(trainee, [Batch.of(texts[1], target)], NUM_GUESSED).shares[0] > 0.05
    trainee.save(tmp_path)
    engine = Engine(MODEL_DIR, **speculative("draft_model", tmp_path))
    assert isinstance(drafter_of(engine.runner), Guarded)


def speculative(method: str, folder: Path) -> dict[str, str]:
    """The option."""
    given = {"method": method, "model": str(folder), "num_speculative_tokens": NUM_GUESSED}
    return {"speculative_config": json.dumps(given)}


def test_the_bundled_head_is_small_and_guesses_well(
    texts: tuple[list[Text], list[Text]], target: Target, tokenizer: PreTrainedTokenizerFast
) -> None:
    """As the engine has it, on questions that neither it nor the model has seen."""
    folder = MODEL_DIR.parent / "head"
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {"config.json", "model.safetensors"}
    assert sum(files.values()) < 1_100_000
    option = speculative("eagle", Path("demo"))
    check_drafter(make_config(MODEL_DIR, **option))
    engine = Engine(MODEL_DIR, **option)
    drafting_of(engine.scheduler).lengths = FixedLengths(NUM_GUESSED)
    asked, said = zip(*(prompt_and_answer(text) for text in texts[1]), strict=True)
    sampling = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
    before = engine.scheduler.totals.num_steps
    num_tokens = sum(len(engine.run([prompt], sampling)[0][0]) for prompt in asked)
    assert num_tokens == sum(map(len, said))
    num_steps = engine.scheduler.totals.num_steps - before
    assert num_tokens / num_steps > 3, "each step brings nearly all of its three guesses, and one more token"


def prompt_and_answer(text: Text) -> tuple[list[int], list[int]]:
    """What was asked, and the last answer."""
    begin = len(text.token_ids) - text.is_answer[::-1].index(False)
    return text.token_ids[:begin], text.token_ids[begin:]


def test_the_engine_guesses_as_training_does(
    head: HeadTraining, target: Target, texts: tuple[list[Text], list[Text]], tmp_path: Path
) -> None:
    head.save(tmp_path)
    option = speculative("eagle", tmp_path)
    check_drafter(make_config(MODEL_DIR, **option))
    engine = Engine(MODEL_DIR, **option)
    drafter = drafter_of(engine.runner)
    drafting_of(engine.scheduler).lengths = FixedLengths(NUM_GUESSED)
    guess, found = drafter.guess, list[tuple[int, list[int]]]()

    def note(rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        guesses = guess(rows, positions, most)
        found.append((int(positions[0]), guesses.token_ids.tolist()))
        return guesses

    drafter.guess = note  # type: ignore[method-assign]
    text = texts[1][0]
    prompt, answer = prompt_and_answer(text)
    engine.run([prompt], SamplingParams(max_tokens=len(answer), temperature=0.0))
    expected: Tensor = head.guesses(Batch.of([text], target), NUM_GUESSED)[:, 0]
    pairs = [
        (token, int(expected[step, position + 1 + step]))
        for position, tokens in found
        for step, token in enumerate(tokens)
        if position + 1 + step < len(text.token_ids)
        and tokens[:step] == text.token_ids[position + 1 : position + 1 + step]
    ]
    assert len(pairs) > 10
    assert sum(own == its for own, its in pairs) >= 0.9 * len(pairs)  # saved in bf16
