"""Beam search at an engine: what it finds is what transformers finds, and steps share pages."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
import transformers

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.frontend.engine.book import Bill, DeltaSink
from penstock.frontend.errors import ApiError, EngineFailed, InvalidParameter, UnsupportedParameter
from penstock.frontend.part import FrontendParts
from penstock.frontend.validation.beams import Beams
from penstock.ipc.faults import FAULTS, ONCE
from penstock.ipc.messages import AddRequest, SequenceBill, SequenceDelta
from penstock.ipc.messages import SamplingParams as IpcSamplingParams
from penstock.parts.beam_search.frontend.beams import Searches
from tests.e2e.servers import serving
from tests.python_api.conftest import SMALL, Checkpoint, checkpoint

__all__ = ["checkpoint"]

PROMPTS = [[3 + i % 90 for i in range(37)], [70, 71, 72], [9]]


def theirs(checkpoint: Checkpoint, prompt: list[int], width: int, stops: list[int], **rules: Any) -> list[list[int]]:
    settings = transformers.GenerationConfig(
        num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=9, pad_token_id=0,
        eos_token_id=stops, **rules,
    )  # fmt: skip
    generate: Any = checkpoint.model.generate
    found = generate(torch.tensor([prompt]), generation_config=settings)[:, len(prompt) :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stops), 9)] for row in found]


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Any:
    with LLM(checkpoint.folder, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def stops(checkpoint: Checkpoint, llm: LLM) -> list[int]:
    """The model's own, and tokens that likely outputs contain."""
    eos = checkpoint.model.config.eos_token_id
    [found] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0.0), use_tqdm=False)
    return [*([eos] if isinstance(eos, int) else eos), found.outputs[0].token_ids[4]]


def test_it_finds_what_transformers_finds(checkpoint: Checkpoint, llm: LLM, stops: list[int]) -> None:
    num_stopped = 0
    for width, rules in (
        (3, {}),
        (4, {"length_penalty": 0.2, "early_stopping": True}),
        (2, {"early_stopping": "never"}),
    ):
        params = SamplingParams(
            n=width,
            max_tokens=9,
            use_beam_search=True,
            stop_token_ids=stops,
            logprobs=2,
            **rules,
        )
        for prompt, found in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
            assert [each.token_ids for each in found.outputs] == theirs(checkpoint, prompt, width, stops, **rules)
            for each in found.outputs:
                ends = each.token_ids[-1] in stops
                num_stopped += ends
                assert each.finish_reason == ("stop" if ends else "length")
                assert each.logprobs is not None
                assert len(each.logprobs) == len(each.token_ids)
                own = [told[token] for told, token in zip(each.logprobs, each.token_ids, strict=True)]
                assert each.cumulative_logprob == pytest.approx(sum(score.logprob for score in own))
                assert all({1, 2} <= {score.rank for score in told.values()} for told in each.logprobs)
            assert found.bill is not None
            assert found.bill.steps > 0
    assert num_stopped > 0


def test_the_best_of_a_wider_search(checkpoint: Checkpoint, llm: LLM, stops: list[int]) -> None:
    params = SamplingParams(n=2, beam_width=4, max_tokens=9, stop_token_ids=stops, temperature=0.7)
    [found] = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == theirs(checkpoint, PROMPTS[1], 4, stops)[:2]


def test_as_vllm_spells_it(checkpoint: Checkpoint, llm: LLM) -> None:
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[1]}, PROMPTS[2]]
    eos = checkpoint.model.config.eos_token_id
    expected = [theirs(checkpoint, prompt, 3, [eos]) for prompt in PROMPTS[1:]]
    for keeps in (False, True):
        params = BeamSearchParams(beam_width=3, max_tokens=9, include_stop_str_in_output=keeps)
        for prompt, output, wanted in zip(PROMPTS[1:], llm.beam_search(prompts, params), expected, strict=True):
            kept = [outputs if keeps or outputs[-1] != eos else outputs[:-1] for outputs in wanted]
            assert [each.tokens for each in output.sequences] == [[*prompt, *outputs] for outputs in kept]
            scores = [each.cum_logprob / len(outputs) for each, outputs in zip(output.sequences, wanted, strict=True)]
            assert scores == sorted(scores, reverse=True)
            assert all(each.text for each in output.sequences)
    with pytest.raises(InvalidParameter, match="n must be between 1 and 64, got 0"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=0, max_tokens=9))


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({"beam_width": 20}, InvalidParameter, "beam_width may be at most 19: 20 minus the number of stop tokens"),
        ({"n": 3, "beam_width": 2}, InvalidParameter, r"beam_width \(2\) must be at least n \(3\)"),
        ({"early_stopping": "soon"}, InvalidParameter, "early_stopping must be true, false or 'never'"),
        ({"length_penalty": 1e9}, InvalidParameter, "length_penalty must be between"),
        ({"stop": ["x"]}, UnsupportedParameter, "stop is not supported with use_beam_search"),
        ({"logit_bias": {5: 1.0}}, UnsupportedParameter, "logit_bias is not supported with use_beam_search"),
        ({"structured_outputs": {"regex": "a"}}, UnsupportedParameter, "structured_outputs is not supported with"),
        ({"dry_multiplier": 1.0}, UnsupportedParameter, "dry_multiplier is not supported with use_beam_search"),
        ({"prompt_logprobs": 0}, UnsupportedParameter, "prompt_logprobs is not supported with use_beam_search"),
    ],
)
def test_what_is_refused(llm: LLM, fields: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        llm.generate([[5]], SamplingParams(use_beam_search=True, **fields), use_tqdm=False)


async def test_on_the_routes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Through deaths of worker and scheduler. Steps compute what is in no full page of a beam's past, and no more."""
    eos = checkpoint.model.config.eos_token_id
    expected = theirs(checkpoint, PROMPTS[1], 3, [eos])
    body = {"prompt": PROMPTS[1], "n": 3, "max_tokens": 9, "use_beam_search": True, "return_token_ids": True}
    trace = tmp_path / "trace"
    flags = ("--dtype", "float32", "--num-pages", "400", "--page-size", "16", "--step-trace", str(trace))
    faults = {FAULTS: "worker.step:kill@7,scheduler.tokens:kill@5", ONCE: str(tmp_path)}
    async with serving(checkpoint.folder, *flags, **faults) as server, aiohttp.ClientSession() as session:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with session.post(f"{server.url}/v1/{path}", json=body) as response:
                assert response.status == 200, await response.text()
                return (await response.json(), response.headers)

        answer, _ = await ask("completions", body)
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert answer["usage"]["completion_tokens"] == sum(map(len, expected))
        deaths = [entry["child"] for entry in server.log if entry["event"] == "process exited, restarting"]
        assert sorted(deaths) == ["penstock-scheduler", "penstock-worker-0"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await ask("completions", body | {"max_tokens": 1500, "ignore_eos": True})
        await server.settled(session)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "num_beams": 4}
        answer, _ = await ask("chat/completions", chat | {"n": 2})
        assert len(answer["choices"]) == 2
        answer, _ = await ask("responses", {"input": "Hello", "max_output_tokens": 6, "beam_width": 2, "store": False})
        assert answer["status"] in ("completed", "incomplete")
        _, headers = await ask("completions", {"prompt": "x", "max_tokens": 2, "length_penalty": 2})
        assert headers["x-penstock-warning"] == "length_penalty: no effect without use_beam_search"
        schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
        for path, fields, why in (
            ("completions", {"echo": True, "logprobs": 1}, "echo with logprobs is not supported"),
            ("completions", {"best_of": 4, "beam_width": 3}, "beam_width (3) and best_of (4) exclude each other"),
            ("responses", {"input": "Hello", "text": {"format": schema}}, "text is not supported"),
        ):
            asked = {**({} if "input" in fields else {"prompt": "x"}), "max_tokens": 4, "use_beam_search": True}
            async with session.post(f"{server.url}/v1/{path}", json=asked | fields) as response:
                assert response.status == 400
                assert why in await response.text()
        text = {"messages": chat["messages"], "max_tokens": 4, "beam_width": 2, "response_format": {"type": "text"}}
        await ask("chat/completions", text)
        far = {"prompt": "x", "max_tokens": 600, "beam_width": 2, "ignore_eos": True, "length_penalty": -100}
        await ask("completions", far)
        long = [3 + i % 90 for i in range(160)]
        await ask("completions", body | {"prompt": long, "max_tokens": 24, "ignore_eos": True})
        await server.settled(session)
    steps = [msgspec.json.decode(line) for line in trace.read_text().splitlines()]
    admitted = [each for step in steps for each in step["admitted"]]
    name = admitted[-1]["request_id"].rpartition("/")[0]
    admitted = [each for each in admitted if each["request_id"].startswith(f"{name}/")]
    assert len(admitted) == 1 + 3 * 23
    assert all(each["num_tokens"] - each["num_reused_tokens"] <= 16 for each in admitted[1:])


class FakeEngine:
    """Ends each request as it is told to."""

    queue: Any = None

    def __init__(self, delta: SequenceDelta | Exception) -> None:
        self._delta = delta
        self.aborted: list[str] = []
        self.bills: list[Bill] = []  # of what is aborted, still to come

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        if isinstance(self._delta, ApiError):
            sink.fail(self._delta)
            sink.bill.add(None)
        elif isinstance(self._delta, SequenceDelta):
            sink.bill.add(None)
            sink.push(first_index, msgspec.structs.replace(self._delta, request_id=request.request_id))
        else:
            self.bills.append(sink.bill)

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        self.aborted.append(request_id)

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...


class Sink:
    """What a request is told."""

    def __init__(self, num: int) -> None:
        self.bill = Bill(num)
        self.deltas: list[SequenceDelta] = []
        self.errors: list[ApiError] = []

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        self.deltas.append(delta)

    def fail(self, error: ApiError) -> None:
        self.errors.append(error)


REQUEST = AddRequest("r", b"\5\0\0\0", IpcSamplingParams(max_tokens=3), n=2)


async def test_errors_end_it() -> None:
    """Those that the engine tells, that the engine is lost, and those of our own; all are billed."""
    told = SequenceDelta("", 0, (), "error", error="no", error_code="internal")
    for ending in (told, EngineFailed("lost"), SequenceDelta("", 0, (7,))):  # without log-probabilities
        sink = Sink(2)
        Searches(Beams(2), FakeEngine(ending)).submit(REQUEST, sink)
        for _ in range(5):
            await asyncio.sleep(0)
        assert sink.bill.is_complete
        if ending is told:
            assert [(delta.request_id, delta.error) for delta in sink.deltas] == [("r", "no")]
        else:
            [error] = sink.errors
            assert isinstance(error, ApiError)


async def test_a_client_that_leaves_ends_it() -> None:
    engine, sink = FakeEngine(RuntimeError("never answers")), Sink(2)
    searches = Searches(Beams(2), engine)
    searches.submit(REQUEST, sink)
    await asyncio.sleep(0)
    searches.abort("r")
    searches.abort("r")
    assert engine.aborted == ["r/1"]
    assert not sink.bill.is_complete
    [bill] = engine.bills
    bill.add(SequenceBill(0, 3, 5e6))
    assert sink.bill.is_complete
    assert (sink.bill.num_steps, sink.bill.device_seconds) == (3, 5.0)
    assert not sink.deltas
    assert not sink.errors


def test_without_the_part_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.part.brought", lambda *_: ())
    with pytest.raises(UnsupportedParameter, match="the part for it is not installed"):
        FrontendParts(None).searcher(Beams(2), None)
