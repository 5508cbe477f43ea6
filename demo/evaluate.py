"""Measure the demo model on phrasings that were kept out of its training.

    python demo/evaluate.py [--model demo/model] [--save FILE.json]

A greedy answer is right if it contains the expected words and is not, word for word, the answer to
another question. "Exact" counts answers that equal the learned one from the first to the last letter.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.demo.arithmetic import small_sums
from penstock.demo.facts import load_facts
from penstock.demo.grammar import held_out_requests
from penstock.demo.newcomers import newcomers_questions
from penstock.demo.unknown import EXPECTED, held_out_questions

MODEL_DIR = Path(__file__).parent / "model"
MAX_NEW_TOKENS = 176
_NUM_SUMS = 300


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question with what a right answer contains, and the learned answer if there is just one."""

    topic: str
    text: str
    expected: str
    answer: str | None = None
    is_written: bool = False  # worded by hand, unlike any template


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of one topic."""

    topic: str
    questions: int
    right: int
    exact: int | None


def held_out() -> list[Question]:
    """Every held-out question, a sample of the sums."""
    found = [
        Question(fact.topic, text, fact.expected, fact.answer, text in fact.written)
        for fact in load_facts()
        for text in fact.held_out
    ]
    sums = [s for s in small_sums() if s.held_out]
    found += [Question("arithmetic", s.question, s.expected, s.answer) for s in sums[:: max(1, len(sums) // _NUM_SUMS)]]
    found += [Question("stories and rhymes", text, words) for text, words in held_out_requests()]
    found += [Question("unknown", text, EXPECTED) for text in held_out_questions()]
    found += [Question("newcomers", text, words) for text, words in newcomers_questions()]
    return found


def is_right(question: Question, answer: str, known_answers: frozenset[str]) -> bool:
    """Whether an answer contains the expected words and is not another question's answer."""
    if question.expected not in answer.lower():
        return False
    return question.answer is None or answer == question.answer or answer not in known_answers


def scores(questions: Sequence[Question], answers: Sequence[str]) -> list[Score]:
    """One score per topic in order of appearance, then the facts asked in hand-written words, and the total."""
    known = frozenset(fact.answer for fact in load_facts())
    marks = [(q, is_right(q, a, known), a == q.answer) for q, a in zip(questions, answers, strict=True)]
    table = [
        _score(topic, [m for m in marks if m[0].topic == topic]) for topic in dict.fromkeys(q.topic for q in questions)
    ]
    table.append(_score("of these, by hand", [m for m in marks if m[0].is_written]))
    table.append(_score("all", marks))
    return table


def _score(topic: str, marks: Sequence[tuple[Question, bool, bool]]) -> Score:
    comparable = all(question.answer is not None for question, _, _ in marks)
    exact = sum(exact for _, _, exact in marks) if comparable else None
    return Score(topic, len(marks), sum(right for _, right, _ in marks), exact)


def answerer(folder: Path, device: str, batch_size: int = 128) -> Callable[[Sequence[str]], list[str]]:
    """A function from questions to greedy answers, batched and padded on the left."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(device).eval()

    @torch.inference_mode()
    def answer(questions: Sequence[str]) -> list[str]:
        order = sorted(range(len(questions)), key=lambda i: len(questions[i]))
        found = [""] * len(questions)
        for start in tqdm(range(0, len(order), batch_size), desc="answering", unit="batch", disable=len(order) < 200):
            chosen = order[start : start + batch_size]
            chats = [[{"role": "user", "content": questions[i]}] for i in chosen]
            batch = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
            ).to(device)
            output = model.generate(
                **batch, do_sample=False, temperature=None, top_p=None, max_new_tokens=MAX_NEW_TOKENS
            )
            texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                found[i] = text
        return found

    return answer


def main() -> int:
    """Answer every held-out question, print the table and the first misses, and save them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="write table, questions and answers as JSON")
    parser.add_argument("--show", type=int, default=10, help="how many wrong answers to print")
    parser.add_argument("--limit", type=int, default=0, help="ask about this many, evenly spread")
    options = parser.parse_args()
    questions = held_out()
    if options.limit:
        questions = questions[:: max(1, len(questions) // options.limit)]
    answers = answerer(options.model, options.device)([q.text for q in questions])
    table = scores(questions, answers)
    print(f"{'topic':20} {'questions':>9} {'right':>7} {'exact':>7}")
    for row in table:
        share = 100 / max(1, row.questions)
        exact = "" if row.exact is None else f"{share * row.exact:6.1f}%"
        print(f"{row.topic:20} {row.questions:9} {share * row.right:6.1f}% {exact:>7}")
    known = frozenset(fact.answer for fact in load_facts())
    wrong = [(q, a) for q, a in zip(questions, answers, strict=True) if not is_right(q, a, known)]
    for question, answer in wrong[: options.show]:
        print(f"\n[{question.topic}] {question.text}\n  expected: {question.expected}\n  answered: {answer}")
    if options.save:
        found = {
            "table": [dataclasses.asdict(row) for row in table],
            "wrong": [{"topic": q.topic, "question": q.text, "answer": a} for q, a in wrong],
        }
        options.save.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
