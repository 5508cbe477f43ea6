"""What drafters are worth to the demo model, on questions that neither has seen: decoding with each, taking turns.

    python -m bench.engine.drafters [--drafter METHOD[:FOLDER[:COUNT]]]... [--out FILE.json]

One row, greedy, one question after the other; prompts are in the prefix cache, so that nearly all of the time is
decoding. Every drafter's answers are compared with those of the model alone. `eagle:demo` is the head that comes with
the demo model; `python -m penstock.demo.speculate` trains heads and draft models.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from bench.local_engine import LocalEngine
from bench.machine import command, commit, machine
from penstock.demo.evaluate import MAX_NEW_TOKENS, MODEL_DIR
from penstock.demo.held_out import held_out_conversations
from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.scheduler.drafting import Drafting
from penstock.parts.drafts.scheduler.lengths import FixedLengths

PLAIN = "none"
_SEED = 5


class Round(NamedTuple):
    """All questions, once."""

    seconds: float
    answers: list[list[int]]
    num_steps: int
    num_guessed: int
    forward_seconds: float
    draft_seconds: float


def option(drafter: str) -> str:
    """--speculative-config for METHOD:FOLDER:COUNT."""
    method, _, rest = drafter.partition(":")
    folder, _, count = rest.partition(":")
    given = {"method": method} | ({"model": folder} if folder else {})
    return "" if drafter == PLAIN else json.dumps(given | ({"num_speculative_tokens": int(count)} if count else {}))


def ask(engine: LocalEngine, prompts: Sequence[Sequence[int]], end: int, now: Callable[[], float]) -> Round:
    """One question after the other."""
    answers: list[list[int]] = []
    num_steps = num_guessed = forward = draft = 0
    began = now()
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=(end,)))
        answers.append([])
        while engine.has_work:
            deltas, _, result = engine.step()
            for delta in deltas:
                answers[-1] += delta.token_ids
            if result is not None:
                num_steps += 1
                forward += result.num_forward_us
                draft += result.num_draft_us
                num_guessed += int(np.frombuffer(result.num_drafted, dtype=np.int32).sum())
    return Round(now() - began, answers, num_steps, num_guessed, forward / 1e6, draft / 1e6)


def figures(rounds: Sequence[Round], plain: Sequence[Round]) -> dict[str, Any]:
    """What the table shows; a round is compared with the model alone in the same round."""
    num_tokens = sum(map(len, plain[0].answers))
    ratios = [alone.seconds / its.seconds for its, alone in zip(rounds, plain, strict=True)]
    step = [1e6 / its.num_steps for its in rounds]
    return {
        "tokens_per_s": [num_tokens / its.seconds for its in rounds],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_step": num_tokens / rounds[-1].num_steps,
        "guesses_per_step": rounds[-1].num_guessed / rounds[-1].num_steps,
        "step_us": statistics.median(us * its.seconds for us, its in zip(step, rounds, strict=True)),
        "forward_us": statistics.median(us * its.forward_seconds for us, its in zip(step, rounds, strict=True)),
        "draft_us": statistics.median(us * its.draft_seconds for us, its in zip(step, rounds, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", action="append", help="default: eagle:demo and ngram")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fixed", action="store_true", help="guess as much as may be in every step, whatever pays")
    parser.add_argument("--processor-time", action="store_true", help="for a machine that has other things to do")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    chats = islice(held_out_conversations(_SEED, most_turns=1), options.questions)
    prompts = [
        tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    before = machine()
    drafters = (PLAIN, *(options.drafter or ("eagle:demo", "ngram")))
    engines = {
        name: LocalEngine(
            MODEL_DIR,
            load_format="safetensors",
            num_threads=options.threads,
            max_num_seqs=1,
            enable_prefix_caching=True,
            speculative_config=option(name),
        )
        for name in drafters
    }
    for engine in engines.values():
        if options.fixed and engine.hello.max_drafts:
            drafting = engine.scheduler.parts.get(Drafting)
            assert drafting is not None, "the worker has a drafter"
            drafting.lengths = FixedLengths(engine.hello.max_drafts)
    now = time.thread_time if options.processor_time else time.perf_counter
    rounds: dict[str, list[Round]] = {name: [] for name in drafters}
    for number in range(options.rounds + 1):
        for name, engine in engines.items():
            once = ask(engine, prompts, tokenizer.eos_token_id, now)
            if number:  # the first one warms up
                rounds[name].append(once)
    alone = rounds[PLAIN]
    for name, each in rounds.items():
        if any(once.answers != alone[0].answers for once in each):
            raise RuntimeError(f"{name}: an answer is not that of the model alone")
    table = {name: figures(each, alone) for name, each in rounds.items()}
    print(
        "drafter                          tokens/s   ratio  tokens/step  guesses/step   step us  forward us  draft us"
    )
    for name, row in table.items():
        print(
            f"{name[-30:]:30} {statistics.median(row['tokens_per_s']):10.0f} {row['ratio']:7.2f}"
            f" {row['tokens_per_step']:12.2f} {row['guesses_per_step']:13.2f} {row['step_us']:9.0f}"
            f" {row['forward_us']:11.0f} {row['draft_us']:9.0f}"
        )
    if options.out:
        record = {
            "commit": commit(),
            "command": command("bench.engine.drafters", argv),
            "machine": before,
            "drafters": table,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
