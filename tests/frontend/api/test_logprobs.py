"""Log-probabilities as clients get them: OpenAI's shapes, streamed and whole, in step with the text."""

from typing import Any

import pytest

from tests.frontend.fake_scheduler import Script, logprob_of, prompt_ids
from tests.frontend.http_client import chat, chat_text, complete, completion_text, error_of, events
from tests.frontend.live_server import LiveServer

STOP_ID = 2


def ids_of(live: LiveServer, text: str) -> list[int]:
    return live.tokenizer.encode(text, add_special_tokens=False)


def text_of(live: LiveServer, token_id: int) -> str:
    return live.tokenizer.decode([token_id])


def content_of(found: list[Any], index: int = 0) -> list[Any]:
    """The entries of a chat stream for one choice, in order."""
    return [
        entry
        for event in found
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index and choice["logprobs"] is not None
        for entry in choice["logprobs"]["content"]
    ]


def joined(found: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """The columns of a completions stream for one choice, put together."""
    columns: dict[str, list[Any]] = {name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
    for event in found:
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] == index and choice["logprobs"] is not None:
                assert choice["logprobs"].keys() == columns.keys()
                for name, values in choice["logprobs"].items():
                    columns[name] += values
    return columns


def test_chat(live: LiveServer) -> None:
    ids = [*ids_of(live, "Water runs"), STOP_ID]
    live.says("Water runs")
    logprobs = chat(live, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs.keys() == {"content", "refusal"}
    assert logprobs["refusal"] is None
    best = [
        {"token": text, "logprob": logprob_of(i), "bytes": list(text.encode())}
        for i, text in enumerate(("<|endoftext|>", "<|im_start|>"))
    ]
    assert logprobs["content"] == [
        {
            "token": text_of(live, i),
            "logprob": logprob_of(i),
            "bytes": list(text_of(live, i).encode()),
            "top_logprobs": best,
        }
        for i in ids
    ]
    assert live.scheduler.added[-1].sampling.num_logprobs == 2
    alone = chat(live, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in alone] == [[]] * len(ids)
    assert [entry["logprob"] for entry in alone] == [logprob_of(i) for i in ids]
    assert chat(live).json()["choices"][0]["logprobs"] is None
    assert live.scheduler.added[-1].sampling.num_logprobs == -1


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream_says_the_same(live: LiveServer, per_step: int, n: int) -> None:
    ids = ids_of(live, "Water runs down the pipe")
    live.plays(lambda request, i: Script(ids[i:], per_step=per_step))
    whole = chat(live, logprobs=True, top_logprobs=1, n=n).json()["choices"]
    found = events(chat(live, logprobs=True, top_logprobs=1, n=n, stream=True))
    for index in range(n):
        assert content_of(found, index) == whole[index]["logprobs"]["content"]
        assert chat_text(found, index) == whole[index]["message"]["content"]


def test_completion(live: LiveServer) -> None:
    text = "Water runs"
    ids = [*ids_of(live, text), STOP_ID]
    live.says(text)
    choice = complete(live, "Hello", logprobs=1).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": [text_of(live, i) for i in ids],
        "token_logprobs": [logprob_of(i) for i in ids],
        "top_logprobs": [{"<|endoftext|>": logprob_of(0), text_of(live, i): logprob_of(i)} for i in ids],
        "text_offset": [text.index(text_of(live, i)) for i in ids[:-1]] + [len(text)],
    }
    alone = complete(live, "Hello", logprobs=0).json()["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{text_of(live, i): logprob_of(i)} for i in ids]
    assert complete(live, "Hello").json()["choices"][0]["logprobs"] is None
    assert joined(events(complete(live, "Hello", logprobs=1, stream=True))) == choice["logprobs"]
    by_id = complete(live, "Hello", logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert by_id["tokens"] == [f"token_id:{i}" for i in ids]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo(live: LiveServer, max_tokens: int, as_ids: bool) -> None:
    """What scores a given text: the prompt's own log-probabilities, null first, then the output's."""
    text = "Water runs down"
    prompt, output = ids_of(live, text), ids_of(live, " the pipe turns the wheel")[:max_tokens]
    live.gives(ids_of(live, " the pipe turns the wheel"))
    asked = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = complete(live, prompt if as_ids else text, **asked).json()
    [choice] = answer["choices"]
    all_ids = prompt + output
    texts = [text_of(live, i) for i in all_ids]
    assert choice["text"] == "".join(texts)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == texts
    assert logprobs["token_logprobs"] == [None, *(logprob_of(i) for i in all_ids[1:])]
    assert logprobs["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    assert logprobs["top_logprobs"][0] is None
    for token, top in zip(texts[1:], logprobs["top_logprobs"][1:], strict=True):
        assert top == {"<|endoftext|>": 0.0} | {
            token: logprob_of(live.tokenizer.encode(token, add_special_tokens=False)[0])
        }
    sampling = live.scheduler.added[-1].sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs, sampling.num_logprobs) == (max(1, max_tokens), 1, 1)
    found = events(complete(live, prompt if as_ids else text, **asked, stream=True))
    assert joined(found) == logprobs
    assert completion_text(found) == choice["text"]


def test_echo_of_several_prompts(live: LiveServer) -> None:
    prompts = [ids_of(live, "Water runs"), ids_of(live, "Hello"), ids_of(live, "The gate opens slowly")]
    whole = complete(live, prompts, echo=True, logprobs=0, max_tokens=1, n=2).json()["choices"]
    assert [choice["index"] for choice in whole] == list(range(6))
    found = events(complete(live, prompts, echo=True, logprobs=0, max_tokens=1, n=2, stream=True))
    for index, choice in enumerate(whole):
        prompt = prompts[index // 2]
        assert choice["logprobs"]["token_logprobs"][: len(prompt)] == [None, *map(logprob_of, prompt[1:])]
        assert joined(found, index) == choice["logprobs"]


def test_an_echo_without_logprobs_asks_for_none(live: LiveServer) -> None:
    answer = complete(live, "Water", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "Water"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    assert live.scheduler.added[-1].sampling.prompt_logprobs == -1


def test_entries_wait_for_their_text(live: LiveServer) -> None:
    """What may become a stop string, and half a character, hold their entries back; none is lost."""
    pipe = ids_of(live, "\u20ac runs down the pipe")
    assert len(ids_of(live, "\u20ac")) > 1
    live.gives(pipe)
    found = events(complete(live, logprobs=0, stop=[" down the wheel"], stream=True))
    shown = tokens = 0
    for event in found[:-1]:
        for choice in event["choices"]:
            shown += len(choice["text"])
            for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]:
                tokens += 1
                assert offset <= shown
            if choice["finish_reason"] is None:
                assert len(live.tokenizer.decode(pipe[:tokens])) == shown
    assert tokens == len(pipe) + 1
    logprobs = joined(found)
    assert logprobs["tokens"][:3] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs["text_offset"][:4] == [0, 0, 0, 1]
    assert logprobs == complete(live, logprobs=0, stop=[" down the wheel"]).json()["choices"][0]["logprobs"]
    assert chat(live, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xE2]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("per_step", [1, 4])
def test_a_stop_string_keeps_the_entries_of_its_tokens(live: LiveServer, include: bool, per_step: int) -> None:
    """One entry for each token that was drawn, as in token_ids, whatever of its text is shown."""
    ids = ids_of(live, "Water runs down the pipe and turns")
    live.gives(ids, per_step=per_step)
    asked = {"logprobs": 0, "stop": ["wn the pi"], "include_stop_str_in_output": include, "return_token_ids": True}
    choice = complete(live, **asked).json()["choices"][0]
    assert choice["text"] == ("Water runs down the pi" if include else "Water runs do")
    assert choice["logprobs"]["token_logprobs"] == [logprob_of(i) for i in choice["token_ids"]]
    found = events(complete(live, **asked, stream=True))
    assert joined(found) == choice["logprobs"]
    assert completion_text(found) == choice["text"]


def test_prompt_logprobs(live: LiveServer) -> None:
    """vLLM's field: by token id, with ranks; of the best ones and of the prompt's own token."""
    prompt = ids_of(live, "Water runs")
    expected: list[Any] = [None] + [
        {
            "0": {"logprob": logprob_of(0), "rank": 1, "decoded_token": "<|endoftext|>"},
            str(i): {"logprob": logprob_of(i), "rank": i + 1, "decoded_token": text_of(live, i)},
        }
        for i in prompt[1:]
    ]
    choices = complete(live, "Water runs", prompt_logprobs=1, n=2).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected]
    assert complete(live, "Water runs").json()["choices"][0]["prompt_logprobs"] is None
    answer = chat(live, prompt_logprobs=0).json()
    sent = prompt_ids(live.scheduler.added[-1])
    assert [None if entry is None else list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *([str(i)] for i in sent[1:]),
    ]


def test_best_of(live: LiveServer) -> None:
    """The answers are the likeliest per token, whatever their length; all that was generated is counted."""
    ids = [300, 290, 280, 270]
    live.plays(lambda request, i: Script([ids[i]] * (4 - i), finish="length"))
    answer = complete(live, ["Hello", "Water"], best_of=4, n=2, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"][0] for choice in answer["choices"]] == [270, 280, 270, 280]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 2 * (4 + 3 + 2 + 1)
    assert [request.n for request in live.scheduler.added] == [4, 4]
    assert complete(live, best_of=1).status == 200


def test_bad_words(live: LiveServer) -> None:
    """Each as it is spelt at the start of a text and behind a space, if it is as many tokens there."""
    complete(live, bad_words=["the", " gate opens"])
    words = live.scheduler.added[-1].sampling.bad_words
    expected = [ids_of(live, "the"), ids_of(live, " the"), ids_of(live, "gate opens"), ids_of(live, " gate opens")]
    assert words[0] == tuple(expected[0])
    assert all(list(word) in expected for word in words)
    assert any(len(word) > 1 for word in words)
    complete(live, bad_words=[])
    assert live.scheduler.added[-1].sampling.bad_words == ()


def test_limits_that_leave_no_token_are_refused(live: LiveServer) -> None:
    [a] = live.tokenizer.encode("a", add_special_tokens=False)
    [spaced] = live.tokenizer.encode(" a", add_special_tokens=False)[:1]
    error = error_of(complete(live, allowed_token_ids=[a], bad_words=["a"]), 400)
    assert error["param"] == "allowed_token_ids"
    assert "leaves no token to sample" in error["message"]
    assert "bad_words forbids some" in error["message"]
    assert complete(live, allowed_token_ids=[a, spaced + 1, 9], bad_words=["a"]).status == 200
    error = error_of(complete(live, allowed_token_ids=[0, 9], stop_token_ids=[9], min_tokens=2, max_tokens=4), 400)
    assert "min_tokens (2) forbids those that stop" in error["message"]
    assert complete(live, allowed_token_ids=[0, 9], stop_token_ids=[9]).status == 200, "it may stop at once"


def test_allowed_token_ids(live: LiveServer) -> None:
    complete(live, allowed_token_ids=[9, 5, 9])
    assert live.scheduler.added[-1].sampling.allowed_token_ids == (9, 5)


def test_truncate_prompt_tokens(live: LiveServer) -> None:
    ids = ids_of(live, "Water runs down the pipe")
    answer = complete(live, "Water runs down the pipe", truncate_prompt_tokens=2, echo=True, max_tokens=0).json()
    assert prompt_ids(live.scheduler.added[-1]) == ids[-2:]
    assert answer["choices"][0]["text"] == live.tokenizer.decode(ids[-2:])
    assert answer["usage"]["prompt_tokens"] == 2
    complete(live, list(range(3, 303)) * 3, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(prompt_ids(live.scheduler.added[-1])) == 500
    chat(live, truncate_prompt_tokens=3)
    assert len(prompt_ids(live.scheduler.added[-1])) == 3


def test_too_much_of_prompts_is_refused(live: LiveServer) -> None:
    prompts = [[5] * 500] * 100
    error = error_of(complete(live, prompts, echo=True, logprobs=20, max_tokens=1), 400)
    assert "1050000 requested" in error["message"]
    assert "524288" in error["message"]
    assert live.scheduler.added == []
    choices = complete(live, prompts, echo=True, logprobs=5, max_tokens=0).json()["choices"]
    assert len(choices) == 100
    assert all(len(choice["logprobs"]["tokens"]) == 500 for choice in choices)
