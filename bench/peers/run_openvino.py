"""Drives OpenVINO GenAI's continuous batching in process. Runs in its environment, so it imports nothing of Penstock's.

    python run_openvino.py MODEL_FOLDER NUM_THREADS MAX_NUM_SEQS NUM_TOKENS PREFIX_CACHING

Prints `ready`, then answers each line on stdin, a JSON object {"concurrency", "requests": [[arrival, prompt ids,
tokens to generate], ...]}, with one line: a list of [start, [[seconds, number of tokens], ...]] per request. Seconds
count from the start of the line's work. There is no HTTP and no text here: that is in OpenVINO's favour.
"""

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import openvino
import openvino_genai

_KV_BLOCK = 32
"""Tokens in one block of OpenVINO's KV cache on a CPU."""


def load(folder: str, num_threads: int, max_num_seqs: int, num_tokens: int, prefix_caching: bool) -> Any:
    """The pipeline, with room for `num_tokens` in its KV cache."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = max_num_seqs
    scheduler.num_kv_blocks = num_tokens // _KV_BLOCK + max_num_seqs
    scheduler.enable_prefix_caching = prefix_caching
    # A tokenizer is asked for, and not used: requests are ids.
    return openvino_genai.ContinuousBatchingPipeline(
        folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}, {}
    )


def run(pipeline: Any, requests: list[list[Any]], concurrency: int) -> list[Any]:
    """All requests in their order, at most `concurrency` at once (0: no limit)."""
    waiting = deque(enumerate(requests))
    running: dict[int, Any] = {}
    answers: list[Any] = [None] * len(requests)
    zero = time.perf_counter()
    while waiting or running:
        while waiting and (not concurrency or len(running) < concurrency):
            index, (_, prompt, num_tokens) = waiting.popleft()
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = num_tokens, True
            answers[index] = (time.perf_counter() - zero, [])
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            running[index] = pipeline.add_request(index, ids, config)
        pipeline.step()
        now = time.perf_counter() - zero
        for index, handle in list(running.items()):
            arrivals = answers[index][1]
            while handle.can_read():
                read = sum(len(output.generated_ids) for output in handle.read().values())
                if read:
                    arrivals.append((now, read))
            if sum(count for _, count in arrivals) >= requests[index][2]:
                del running[index]
    return answers


def main() -> None:
    """Load, say so, and work off the lines."""
    folder, *numbers = sys.argv[1:]
    num_threads, max_num_seqs, num_tokens, prefix_caching = map(int, numbers)
    pipeline = load(folder, num_threads, max_num_seqs, num_tokens, bool(prefix_caching))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(pipeline, asked["requests"], asked["concurrency"])), flush=True)


if __name__ == "__main__":
    main()
