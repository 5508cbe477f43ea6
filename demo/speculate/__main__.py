"""Train drafters for the demo model on its own answers, and measure how often they guess right.

    python -m penstock.demo.speculate --out FOLDER       # FOLDER/head, an EAGLE head, and FOLDER/draft, a small model

Nothing is downloaded. Runs are seeded; on one machine and one thread count a run repeats exactly.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from penstock.demo.evaluate import MODEL_DIR
from penstock.demo.speculate.answers import Batch, batches, frequent_tokens, held_out_texts, training_texts
from penstock.demo.speculate.draft import DraftTraining
from penstock.demo.speculate.head import HeadTraining
from penstock.demo.speculate.target import Target
from penstock.demo.speculate.training import Acceptance, Trainee, acceptance, train

_TOKENS_PER_STEP = 1024
_NUM_MEASURED = 4  # guesses in a step


class Recipe(NamedTuple):
    """How to train a drafter."""

    method: str  # of --speculative-config
    num_steps: int
    learning_rate: float


RECIPES = {"head": Recipe("eagle", 800, 4e-3), "draft": Recipe("draft_model", 1200, 3e-3)}


def main() -> None:
    """Parse the command line, let the model answer, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--only", choices=tuple(RECIPES), help="default: both")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="a demo model, as demo/make.py writes it")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of the recipe's")
    parser.add_argument("--questions", type=int, default=4000, help="conversations to train on")
    parser.add_argument("--held-out", type=int, default=200, help="conversations to measure with")
    parser.add_argument("--intermediate-size", type=int, default=256, help="of the head's MLP")
    parser.add_argument("--outputs", type=int, default=2048, help="of the head: the most frequent tokens")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the draft model")
    parser.add_argument("--layers", type=int, default=1, help="of the draft model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    target = Target(options.model)
    asked = options.model, tokenizer, options.seed
    texts = training_texts(*asked, options.questions, options.threads)
    unseen = held_out_texts(*asked, options.held_out, options.threads)
    measured = [Batch.of(unseen[i : i + 16], target) for i in range(0, len(unseen), 16)]
    source = batches(texts, _TOKENS_PER_STEP, target, options.seed)
    for name, recipe in RECIPES.items():
        if options.only in (None, name):
            began = time.perf_counter()
            trainee: Trainee
            if name == "head":
                trainee = HeadTraining(
                    target, options.intermediate_size, frequent_tokens(texts, options.outputs), options.seed
                )
            else:
                trainee = DraftTraining(target, tokenizer, options.hidden_size, options.layers, options.seed)
            train(trainee, source, options.steps or recipe.num_steps, recipe.learning_rate, name)
            found = acceptance(trainee, measured, _NUM_MEASURED)
            trainee.save(options.out / name)
            _show(options.out / name, recipe.method, found, time.perf_counter() - began)


def _show(folder: Path, method: str, found: Acceptance, seconds: float) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB, {seconds:.0f} s")
    for place, (share, guessed) in enumerate(zip(found.shares, found.num_guessed, strict=True), 1):
        print(f"  guess {place}: {share:6.1%} right of {guessed}, where those before it were")
    print(f"  {found.tokens_per_step:.2f} tokens a step with {len(found.shares)} guesses, on questions nobody has seen")
    config = json.dumps({"method": method, "model": str(folder)})
    print(f"  penstock serve --speculative-config '{config}'", flush=True)


if __name__ == "__main__":
    main()
