"""A model whose layers keep states, through real processes: each turn goes on from the one before, whatever dies."""

from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.checkpoints import make_tokenizer
from tests.e2e.servers import Server, serving, stream
from tests.gpu_worker.checkpoints import greedy_errors
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.table import CASES

PAGE, NUM_NEW = 16, 24
FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "40", "--page-size", str(PAGE))


class Turn:
    """What a request brought."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_cached = 0
        self.bill: dict[str, Any] = {}


async def ask(http: aiohttp.ClientSession, server: Server, text: list[int], *, kill: str = "") -> Turn:
    """`kill`: a process, after the first tokens."""
    body = {"model": "m", "prompt": text, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "return_bill": True, "stream_options": {"include_usage": True}}
    turn = Turn()
    async for event in stream(http, f"{server.url}/v1/completions", body):
        for choice in event["choices"]:
            turn.tokens += choice.get("token_ids") or []
        if turn.tokens and kill:
            server.children()[kill].kill()
            kill = ""
        if usage := event.get("usage"):
            turn.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            turn.bill = usage["bill"]
    return turn


async def test_turns_compute_a_page_and_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    case = CASES["qwen3_next"]
    reference = Reference(folder, case._replace(changes={**case.changes, "vocab_size": make_tokenizer(folder)}))
    said = [[(37 * i + 11 * turn) % 150 + 3 for i in range(50 if not turn else 13)] for turn in range(4)]
    async with serving(folder, *FLAGS) as server, aiohttp.ClientSession() as http:
        text: list[int] = []
        for number, new in enumerate(said):
            num_before = len(text) - 1  # the last token of an answer has not been computed
            text = text + new
            is_last = number == len(said) - 1
            turn = await ask(http, server, text, kill="penstock-worker-0" if is_last else "")
            assert len(turn.tokens) == NUM_NEW
            assert greedy_errors(reference.model, text, turn.tokens)[0] == []
            assert num_before - turn.num_cached <= PAGE
            if not is_last:  # then it has entered rows of two workers
                is_whole = turn.num_cached // PAGE == (len(text) - 1) // PAGE
                assert turn.bill.get("cache_miss", "") in ([""] if is_whole else ["no_pages", "no_snapshot"])
            text += turn.tokens
        again = await ask(http, server, text)
        assert len(text) - 1 - again.num_cached <= PAGE, "what was computed again is cached again"
        await server.settled(http)
        events = {
            labels["event"]: n for labels, n in await server.labelled(http, "penstock_state_snapshot_events_total")
        }
        assert events["loaded"] >= len(said)
        [(_, used), (_, most)] = sorted(await server.labelled(http, "penstock_state_snapshots"), key=lambda its: its[1])
        assert 0 < used <= most
        misses = await server.labelled(http, "penstock_state_prefix_misses_total")
        assert sum(n for _, n in misses) >= len(said)
