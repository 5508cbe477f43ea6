"""Greedy texts of the demo model from GGUF files, by Penstock and by llama.cpp from the same file.

    python -m bench.formats.gguf_parity [--envs ~/.cache/penstock/peers] [--kinds Q8_0,Q4_K_M] [--out FILE.json]

Needs llama.cpp (`bench/peers/envs.py` makes its environment). Each of twenty prompts is given as token ids; texts end
with the end token or after 64 tokens. The two round at different places (llama.cpp rounds the inputs of every product
to 8 bits), so logits differ a little. Where the texts part, both read the same tokens before: the table has how far the
two best tokens are apart there (in our log-probabilities), and how far the two programs' log-probabilities of the same
token were apart at most, over all positions with the same text before. A difference is explained by rounding if the gap
is at most twice that.
"""

import argparse
import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.machine import commit, machine
from bench.peers.envs import Environment, make
from bench.peers.model import to_gguf
from bench.server_process import free_port, running
from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.models.finding.registry import open_model

NUM_TOKENS = 64
_TOP = 8
QUESTIONS = (
    "Hello!", "Who are you?", "What is a page?", "What is paged attention?", "What is continuous batching?",
    "What is the prefix cache?", "What does the scheduler do?", "What is prefill?", "What is decode bound by?",
    "How do I start Penstock?", "What does --max-num-seqs do?", "What is quantization?", "What is tensor parallelism?",
    "What is a token?", "Tell me a story.", "Write a rhyme.", "What is 12 plus 7?", "What is preemption?",
    "What is the difference between prefill and decode?", "How does streaming work?",
)  # fmt: skip


class Text(NamedTuple):
    """Greedy tokens of one prompt, and at each the log-probabilities of the best ones."""

    tokens: list[int]
    best: list[dict[int, float]]


class Difference(NamedTuple):
    """Where two texts part."""

    question: str
    position: int
    gap: float  # between our token and theirs, in our log-probabilities


def by_penstock(file: Path, prompts: list[list[int]], dtype: str) -> list[Text]:
    """Texts by the engine in this process."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=_TOP)
    with LLM(str(file), dtype=dtype) as llm:
        outputs = llm.generate(prompts, sampling)
    texts = []
    for output in outputs:
        its = output.outputs[0]
        best = [{token_id: entry.logprob for token_id, entry in step.items()} for step in its.logprobs or []]
        texts.append(Text(list(its.token_ids), best))
    return texts


def by_llama_cpp(env: Environment, file: Path, prompts: list[list[int]]) -> list[Text]:
    """Texts by llama.cpp's server with its defaults."""
    with _server(env, file) as url:
        return [_text(_post(f"{url}/completion", prompt)) for prompt in prompts]


@contextmanager
def _server(env: Environment, file: Path) -> Iterator[str]:
    port = free_port()
    command: list[str | Path] = [env.program("llama-server"), "--model", file, "--port", str(port), "--parallel", "1"]
    health, log = f"http://127.0.0.1:{port}/health", file.with_suffix(".log")
    with running([*command, "--threads", "1", "--ctx-size", "2048"], health, {}, 120.0, log):
        yield f"http://127.0.0.1:{port}"


def _post(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {
        "prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "n_probs": _TOP, "return_tokens": True,
        "cache_prompt": False,
    }  # fmt: skip
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _text(answer: dict[str, Any]) -> Text:
    steps = answer["completion_probabilities"]
    return Text(
        [step["id"] for step in steps],
        [{top["id"]: top["logprob"] for top in step["top_logprobs"]} for step in steps],
    )


def compare(ours: list[Text], theirs: list[Text], ends: set[int]) -> dict[str, Any]:
    """How many tokens are equal, the largest distance of log-probabilities, and each difference."""
    num_equal = num_tokens = 0
    distance = 0.0
    differences = []
    for question, (a, b) in zip(QUESTIONS, zip(ours, theirs, strict=True), strict=True):
        left, right = _until_end(a.tokens, ends), _until_end(b.tokens, ends)
        num_tokens += max(len(left), len(right))
        num_equal += sum(x == y for x, y in zip(left, right, strict=False))
        for position, (mine, its) in enumerate(zip(left, right, strict=False)):
            here, there = a.best[position], b.best[position]
            likely = [token for token in here.keys() & there.keys() if here[token] > -5]
            distance = max([distance, *(abs(here[token] - there[token]) for token in likely)])
            if mine != its:
                differences.append(Difference(question, position, here[mine] - here.get(its, min(here.values()))))
                break
    explained = [its for its in differences if its.gap <= 2 * distance]
    return {
        "num_tokens": num_tokens,
        "equal_share": num_equal / num_tokens,
        "num_equal_texts": len(ours) - len(differences),
        "largest_distance": distance,
        "differences": [its._asdict() for its in differences],
        "num_explained": len(explained),
    }


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]


def main() -> None:
    """Compare, print a table, and write it."""
    parser = argparse.ArgumentParser(description="Greedy texts from GGUF files by Penstock and by llama.cpp.")
    parser.add_argument("--envs", type=Path, default=Path("~/.cache/penstock/peers").expanduser())
    parser.add_argument("--kinds", default="BF16,Q8_0,Q4_K_M,Q6_K,Q5_K_M,Q4_0,Q3_K_M")
    parser.add_argument("--dtypes", default="float32,auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    env = make("llamacpp", args.envs, print)
    demo = open_model(Config())
    ends = set(demo.generation_config["eos_token_id"])
    found: dict[str, Any] = {"commit": commit(), "machine": machine(), "rows": []}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "demo")
        shutil.copytree(demo.path, folder)
        tokenizer = load_tokenizer(demo)
        chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
        prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
        print("| file | dtype | equal tokens | equal texts | differences, explained | log-probabilities differ by |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for kind in args.kinds.split(","):
            file = to_gguf(env, folder, kind)
            theirs = by_llama_cpp(env, file, prompts)
            for dtype in args.dtypes.split(","):
                row = compare(by_penstock(file, prompts, dtype), theirs, ends)
                found["rows"].append({"kind": kind, "dtype": dtype, **row})
                print(
                    f"| {kind} | {dtype} | {row['equal_share']:.1%} | {row['num_equal_texts']} of {len(QUESTIONS)} | "
                    f"{len(row['differences'])}, {row['num_explained']} | {row['largest_distance']:.3f} |",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
