"""Batches: forms of prompts, order, failures, memory, several models, scripts."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import UNSET

import penstock
from penstock import LLM, ApiError, BatchError, ConfigError, RequestOutput, SamplingParams
from penstock.in_process import InProcessEngine
from penstock.prompts import Chat, Prompt
from tests.faults.soak import sized
from tests.python_api.conftest import SMALL, Checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_PROMPTS = sized(2500, 10_000)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_every_form_of_a_prompt(llm: LLM) -> None:
    token_ids = [3 + byte for byte in range(40, 50)]
    one = ids(llm.generate(token_ids, GREEDY, use_tqdm=False))
    assert ids(llm.generate([token_ids], GREEDY, use_tqdm=False)) == one
    assert ids(llm.generate({"prompt_token_ids": token_ids}, GREEDY, use_tqdm=False)) == one
    array: Any = np.array(token_ids)
    assert ids(llm.generate(array, GREEDY, use_tqdm=False)) == one
    assert ids(llm.generate([array], GREEDY, use_tqdm=False)) == one
    with pytest.raises(ApiError, match="a text, token ids or a chat, got bytes"):
        llm.generate([b"a b"], GREEDY, use_tqdm=False)
    both: list[Prompt] = ["a b", {"prompt": "a b"}]
    texts = llm.generate(both, GREEDY, use_tqdm=False)
    assert texts[0].outputs == texts[1].outputs
    chat = [{"role": "user", "content": "a"}]
    chats = [llm.chat(chat, GREEDY, use_tqdm=False), llm.chat([chat], GREEDY, use_tqdm=False)]
    chats += [llm.generate(chat, GREEDY, use_tqdm=False), llm.generate([chat], GREEDY, use_tqdm=False)]
    assert all(ids(each) == ids(chats[0]) for each in chats)
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    kinds: list[Prompt] = ["a b", token_ids, chat]
    mixed = llm.generate(iter(kinds), GREEDY, use_tqdm=False)
    assert ids(mixed) == [texts[0].outputs[0].token_ids, one[0], ids(chats[0])[0]]
    assert [output.request_id for output in mixed] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [("hello", "a chat is a list of messages, got str"), (["hello"], "a chat is a list of messages, got str")],
)
def test_a_text_is_no_chat(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_each_message_is_a_dict(llm: LLM) -> None:
    said: Any = Chat([{"role": "user", "content": "a"}, "b"])  # type: ignore[list-item]
    with pytest.raises(ApiError, match="a message is a dict with role and content, got str"):
        llm.generate(said, GREEDY, use_tqdm=False)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 7)]
    assert [len(each) for each in ids(llm.generate(["a", "b", "c"], params, use_tqdm=False))] == [3, 1, 7]
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(ValueError, match="zip"):
        llm.generate(iter(["a", "b"]), params, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(["a"], {"max_tokens": 2}, use_tqdm=False)  # type: ignore[arg-type]


def test_guesses_change_no_token(checkpoint: Checkpoint) -> None:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True) for t in (0.0, 0.3)]
    with LLM(checkpoint.folder, **SMALL) as plain:
        expected = ids(plain.generate(["a b a b"] * 2, params, use_tqdm=False))
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(checkpoint.folder, speculative_config=speculative, **SMALL) as other:
        guessed = 0
        for asked in (None, False, {"num_speculative_tokens": 1}):
            for each in params:
                each.speculative = asked
            outputs = other.generate(["a b a b"] * 2, params, use_tqdm=False)
            assert ids(outputs) == expected
            bill = outputs[0].bill
            assert bill is not None
            if asked is False:
                assert bill.guessed_tokens is UNSET
                assert bill.steps == 60
            elif bill.guessed_tokens is not UNSET:
                assert bill.accepted_tokens is not UNSET
                assert 60 - bill.accepted_tokens <= bill.steps <= 60
                guessed += bill.guessed_tokens
    assert guessed
    with pytest.raises(ConfigError, match="speculative_config"):
        LLM(checkpoint.folder, speculative_config={"method": "guess"}, **SMALL)


def test_what_a_prompt_shares_is_cached(llm: LLM) -> None:
    llm.generate("x" * 64, GREEDY, use_tqdm=False)
    [again] = llm.generate("x" * 64, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens >= 48
    llm.reset_prefix_cache()
    [anew] = llm.generate("x" * 64, GREEDY, use_tqdm=False)
    assert anew.num_cached_tokens == 0
    assert anew.outputs == again.outputs


def test_a_prompt_that_fails_takes_no_other_along(llm: LLM) -> None:
    too_long = [5] * 3000
    with pytest.raises(ApiError, match=r"context length is 2048 tokens, the prompt has 3000"):
        llm.generate(too_long, GREEDY, use_tqdm=False)
    with pytest.raises(BatchError, match=r"2 of 4 prompts failed, the first is prompt 1: .*3000") as failed:
        llm.generate(["a", too_long, "b", {"text": "c"}], GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    outputs = failed.value.outputs
    assert [output.error is None for output in outputs] == [True, False, True, False]
    assert ids([outputs[0], outputs[2]]) == ids(llm.generate(["a", "b"], GREEDY, use_tqdm=False))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "temperature must be between 0 and 100, got -1"),
        ({"temperature": "hot"}, "temperature: expected"),
        ({"n": 0}, "n must be between 1 and 64, got 0"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"stop_token_ids": [9999]}, r"stop_token_ids\[0\] must be a token id"),
        ({"structured_outputs": {"json": {"type": "no such type"}}}, "structured_outputs"),
        ({"max_tokens": 5, "min_tokens": 6}, r"min_tokens \(6\) exceeds max_tokens \(5\)"),
    ],
)
def test_parameters_are_checked_as_the_server_checks_them(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        llm.generate("a", SamplingParams(**params), use_tqdm=False)


def test_what_is_not_honoured_is_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match="use_beams"):
        SamplingParams(use_beams=True)  # type: ignore[call-arg]
    for options, words in (
        ({"max_num_seq": 3}, "max_num_seqs"),
        ({"max_num_seqs": -1}, "max_num_seqs -1: Expected `int` >= 0"),
        ({"page_size": 3}, "page_size must be a power of two, got 3"),
        ({"port": 8000}, "port is an option of `penstock serve` that has no effect here"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: an engine in process"),
        ({"role": "decode"}, "role: an engine in process"),
        ({"kv_transfer_address": "ipc:///a"}, "kv_transfer_address: an engine in process"),
        ({"step_trace": "/tmp/x"}, "step_trace has an effect only with engine='process'"),
        ({"engine": "cloud"}, "engine must be 'thread' or 'process', got 'cloud'"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(checkpoint.folder, **options)
    with pytest.raises(ConfigError, match="no checkpoint folder at '/nowhere'"):
        LLM("/nowhere")


def test_one_model_after_the_other_but_not_two_at_once(checkpoint: Checkpoint) -> None:
    with LLM(checkpoint.folder, **SMALL) as first:
        expected = ids(first.generate(["a", "b"], GREEDY, use_tqdm=False))
        with pytest.raises(ConfigError, match="another LLM lives in this process"):
            LLM(checkpoint.folder, **SMALL)
        assert ids(first.generate(["a", "b"], GREEDY, use_tqdm=False)) == expected
    second = LLM(checkpoint.folder, **SMALL)
    assert ids(second.generate(["a", "b"], GREEDY, use_tqdm=False)) == expected
    del second  # frees it, too
    with LLM(checkpoint.folder, **SMALL) as third:
        assert ids(third.generate(["a", "b"], GREEDY, use_tqdm=False)) == expected
    third.close()
    with pytest.raises(RuntimeError, match="closed"):
        third.generate("a", GREEDY, use_tqdm=False)


async def test_it_works_where_an_event_loop_runs_already(llm: LLM) -> None:
    assert asyncio.get_running_loop() is not None
    assert len(llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_batch_that_is_given_up_leaves_nothing_behind(llm: LLM) -> None:
    long = SamplingParams(max_tokens=1500, ignore_eos=True)
    outputs = llm.generate_iter(iter(["a"] * 8), [GREEDY, *[long] * 7])
    assert next(outputs).request_id == "0"
    outputs.close()
    free = llm.generate("b", GREEDY, use_tqdm=False)
    assert len(ids(free)[0]) == 4
    service = llm._llm._service
    assert service is not None
    assert service.engine.num_live == 0
    assert len(service.generations) == 0


def test_a_step_that_fails_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: InProcessEngine) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(InProcessEngine, "step", fail)
    with pytest.raises(ApiError, match="the device is gone"):
        llm.generate("a", GREEDY, use_tqdm=False)
    with pytest.raises(ApiError, match="the device is gone"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_thousands_of_prompts_with_bounded_memory(checkpoint: Checkpoint) -> None:
    """They are taken from the iterator as the engine takes them."""
    num_taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_taken
        for i in range(NUM_PROMPTS):
            num_taken += 1
            yield [3 + i % 200, 3 + i // 200, *range(10, 90)]

    with LLM(checkpoint.folder, max_num_seqs=64, **SMALL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        process, before, most = psutil.Process(), 0, 0
        for num_done, output in enumerate(llm.generate_iter(prompts(), params), 1):
            assert len(output.outputs[0].token_ids) == 2
            assert num_taken - num_done <= 2 * 64
            if num_done % 500 == 0:
                used = process.memory_info().rss
                before, most = before or used, max(most, used)
        assert num_done == NUM_PROMPTS
        assert most - before < 32 << 20
        service = llm._llm._service
        assert service is not None
        assert len(service.generations) == service.engine.num_live == 0


SCRIPT = """
from penstock import LLM, SamplingParams
llm = LLM({folder!r}, num_threads=1, num_pages=100, engine={engine!r})
[output] = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids), llm.chat([{{"role": "user", "content": "a"}}], use_tqdm=False)[0].finished)
"""


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_script_needs_no_main_and_no_close(checkpoint: Checkpoint, tmp_path: Path, engine: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(checkpoint.folder), engine=engine))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=250, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 True\n", "")


INTERRUPTED = """
import os, signal, time
from penstock import LLM, engine_thread
from penstock.in_process import InProcessEngine

def loads_slowly(config):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1.0)
    return InProcessEngine(config)

engine_thread.InProcessEngine = loads_slowly
try:
    LLM({folder!r}, num_threads=1, num_pages=100)
except KeyboardInterrupt:
    engine_thread.InProcessEngine = InProcessEngine
with LLM({folder!r}, num_threads=1, num_pages=100) as llm:
    print(len(llm.generate("a", use_tqdm=False)))
"""


def test_after_ctrl_c_while_it_loads_another_one_may_be_made(checkpoint: Checkpoint, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.format(folder=str(checkpoint.folder)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_processes_that_die_are_replaced_and_requests_go_on(checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    others = set(psutil.Process().children(recursive=True))  # of servers that tests share
    with LLM(checkpoint.folder, **SMALL) as llm:
        expected = ids(llm.generate(["a", "b"], params, use_tqdm=False))
    with LLM(checkpoint.folder, engine="process", **SMALL) as llm:
        outputs = llm.generate_iter(["a", "b"], params)
        killer = threading.Timer(0.2, kill_worker, (others,))
        killer.start()
        found = sorted(outputs, key=lambda output: output.request_id)
        killer.join()
        assert [output.error for output in found] == [None, None]
        assert ids(found) == expected
    assert set(psutil.Process().children(recursive=True)) <= others


def kill_worker(others: set[psutil.Process]) -> None:
    for child in set(psutil.Process().children(recursive=True)) - others:
        if child.cmdline()[:1] == ["penstock-worker-0"]:
            child.kill()
            return
    pytest.fail("there is no worker")


def test_an_engine_of_processes_that_cannot_start_says_so(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"the engine cannot be started \(exit code 2\)"):
        LLM(checkpoint.folder, engine="process", cpu_kv_cache_gib=1e-8)


def test_the_package_alone_loads_next_to_nothing() -> None:
    check = "import sys, penstock; sys.exit(bool({'torch', 'msgspec', 'asyncio'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    assert {getattr(penstock, name).__name__ for name in penstock.__all__} >= {"LLM", "AsyncLLM", "SamplingParams"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        penstock.Nothing  # noqa: B018
