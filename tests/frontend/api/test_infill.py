"""Filling in the middle: prompts are those that each model's authors publish, token for token."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

from penstock.frontend.schema_infill import InfillTimings
from penstock.frontend.text.infill import FORMATS, Chunk, Infill, infill_of
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.models.gguf.container import Strings
from penstock.models.gguf.tokenizer import GGUFTokenizer
from tests.frontend.checkpoint_folder import byte_level_tokenizer
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import complete, error_of, events, get, post
from tests.frontend.live_server import LiveServer, made_server

BEFORE, AFTER = "def f(x):\n    y = ", "\n    return y  # done\n"
SENTENCES = ["def f(x): return x", "    y = x + 1  # done", "Water runs down the pipe."] * 20
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")

PUBLISHED: dict[tuple[str, ...], str] = {
    QWEN[:3]: "<|fim_prefix|>{0}<|fim_suffix|>{1}<|fim_middle|>",
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>{0}<fim_suffix>{1}<fim_middle>",
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"): "<fim-prefix>{0}<fim-suffix>{1}<fim-middle>",
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"): "<｜fim▁begin｜>{0}<｜fim▁hole｜>{1}<｜fim▁end｜>",
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"): "<[fim-suffix]>{1}<[fim-prefix]>{0}<[fim-middle]>",
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"): "[SUFFIX]{1}[PREFIX]{0}",
}
"""As the models' own pages write them, for tokenizers that add no space."""


def sentencepiece(*marks: str, adds_space: bool = True) -> Tokenizer:
    """Llama's kind: byte pairs over characters, a mark for spaces, one of them before each text if `adds_space`."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    to_marks = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks])
    trained.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    whole = json.loads(trained.to_str())
    vocab = whole["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    whole["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens(list(marks))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks]) if adds_space else to_marks
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def prompt(
    tokenizer: TextTokenizer, infill: Infill, before: str = BEFORE, after: str = AFTER, **options: Any
) -> list[int]:
    """As the server makes it of short texts."""
    joint = "" if infill.num_joint_tokens is None else "\u263a"
    first = tokenizer.encode(before, add_special_tokens=False)
    second = tokenizer.encode(joint + after, add_special_tokens=False)[infill.num_joint_tokens or 0 :]
    return infill.prompt(first, second, **options)


@pytest.mark.parametrize("marks", PUBLISHED)
def test_published_prompts(marks: tuple[str, ...]) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(marks))
    text = TextTokenizer(tokenizer, {})
    infill = infill_of(text, {})
    assert infill is not None
    assert infill.begin == ()
    expected = tokenizer.encode(PUBLISHED[marks].format(BEFORE, AFTER)).ids
    assert prompt(text, infill) == expected
    assert set(infill.ends) >= {tokenizer.token_to_id(mark) for mark in marks}
    text.close()


@pytest.mark.parametrize("marks", [("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")])
@pytest.mark.parametrize("before", [BEFORE, " x", "", "x = "])
@pytest.mark.parametrize("after", [AFTER, " x", "x", "ø"])
def test_prompts_of_tokenizers_that_add_a_space(marks: tuple[str, ...], before: str, after: str) -> None:
    """CodeLlama's and Codestral's: a space comes before the text at the front, and none before the one behind."""
    tokenizer, bare = sentencepiece(*marks), sentencepiece(*marks, adds_space=False)
    text = TextTokenizer(tokenizer, {})
    infill = infill_of(text, {})
    assert infill is not None
    one, other, last, *_ = (tokenizer.token_to_id(mark) for mark in marks)
    first = tokenizer.encode(before, add_special_tokens=False).ids
    second = bare.encode(after, add_special_tokens=False).ids
    if marks[0] == "[PREFIX]":
        assert prompt(text, infill, before, after) == [1, other, *second, one, *first]
    else:
        assert prompt(text, infill, before, after) == [1, one, *first, other, *second, last]
    text.close()


def test_tokens_that_the_tokenizer_names() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<a>", "<b>", "<c>"])
    text = TextTokenizer(tokenizer, {})
    assert infill_of(text, {}) is None
    named = infill_of(text, {"prefix_token": "<a>", "suffix_token": {"content": "<b>"}, "middle_token": "<c>"})
    assert named is not None
    assert prompt(text, named) == tokenizer.encode(f"<a>{BEFORE}<b>{AFTER}<c>").ids
    text.close()


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_tokens_that_a_gguf_file_names(keys: tuple[str, ...]) -> None:
    words = [b"<a>", b"<b>", b"<c>"]
    tokens = Strings.__new__(Strings)
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": at for at, key in enumerate(keys)}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    read = GGUFTokenizer(metadata, "llama")
    read.__dict__["_tokens"] = [word.decode() for word in words]
    found = read.tokenizer_config()
    assert [found[f"{part}_token"] for part in ("prefix", "suffix", "middle")] == ["<a>", "<b>", "<c>"]


def test_what_is_farthest_from_the_gap_goes_first() -> None:
    infill = Infill(1, 2, 3, False, 4, 5, (0,), (), None)
    chunks = [Chunk([10], [11] * 4), Chunk([20], [21] * 4)]
    whole = infill.prompt([7] * 8, [8] * 4, chunks, [30], [31])
    assert whole == [0, 4, 30, 5, 10, *[11] * 4, 5, 20, *[21] * 4, 5, 31, 1, *[7] * 8, 2, *[8] * 4, 3]
    for limit in range(4, len(whole) + 2):
        cut = infill.prompt([7] * 8, [8] * 4, chunks, [30], [31], max_tokens=limit)
        assert len(cut) <= limit
        assert (cut[0], cut[-1]) == (0, 3)
        kept = [cut.count(token) for token in (11, 21, 7, 8)]
        assert kept[0] in (0, 4)
        assert kept[1] in (0, 4)
        assert kept[0] <= kept[1]
        if kept[1]:
            assert kept[2:] == [8, 4]
    assert infill.prompt(list(range(10, 18)), [], max_tokens=8) == [0, 1, 14, 15, 16, 17, 2, 3]
    assert infill.prompt([7], [8], begins=False) == [1, 7, 2, 8, 3]


@pytest.fixture(scope="module")
def infill_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with made_server(tmp_path_factory.mktemp("infill"), special_tokens=QWEN) as live:
        yield live


@pytest.fixture
def coder(infill_server: LiveServer) -> LiveServer:
    infill_server.reset()
    return infill_server


def asked(live: LiveServer) -> list[int]:
    return prompt_ids(live.scheduler.added[-1])


def ids_of(live: LiveServer, text: str) -> list[int]:
    return live.tokenizer.encode(text, add_special_tokens=False)


def test_completions_with_a_suffix(coder: LiveServer) -> None:
    coder.says("x + 1")
    expected = ids_of(coder, f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>")
    with openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="alias", prompt=BEFORE, suffix=AFTER, max_tokens=20)
        assert answer.choices[0].text == "x + 1"
        assert asked(coder) == expected
        pieces = client.completions.create(model="alias", prompt=BEFORE, suffix=AFTER, max_tokens=20, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "x + 1"
    ends = coder.scheduler.added[-1].sampling.stop_token_ids
    assert {coder.tokenizer.token_id(mark) for mark in QWEN} <= set(ends)
    assert complete(coder, ["a", "b"], suffix="c").status == 200
    assert complete(coder, BEFORE, suffix=AFTER, truncate_prompt_tokens=9).status == 200
    assert len(asked(coder)) == 9
    assert asked(coder)[0] == expected[0]
    assert asked(coder)[-1] == expected[-1]
    for fields in ({"echo": True}, {"prompt": [5, 6]}):
        assert (
            error_of(post(coder, "/v1/completions", {"prompt": BEFORE, "suffix": "x"} | fields), 400)["param"]
            == "suffix"
        )
    assert complete(coder, BEFORE, suffix="").status == 200  # as if it were left out
    assert asked(coder) == ids_of(coder, BEFORE)


def test_special_tokens_in_code_are_text(coder: LiveServer) -> None:
    body = {"input_prefix": "a <|fim_suffix|> b", "input_suffix": "<|endoftext|>", "n_predict": 4}
    assert post(coder, "/infill", body).status == 200
    found = asked(coder)
    marks = [coder.tokenizer.token_id(mark) for mark in QWEN[:3]]
    assert [
        token_id for token_id in found if token_id in coder.tokenizer.special_ids((*QWEN, "<|endoftext|>"))
    ] == marks
    assert coder.tokenizer.decode(found) == "<|fim_prefix|>a <|fim_suffix|> b<|fim_suffix|><|endoftext|><|fim_middle|>"


def test_infill(coder: LiveServer) -> None:
    coder.says("x + 1")
    body: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER, "prompt": "(", "n_predict": 40}
    answer = post(coder, "/infill", body | {"cache_prompt": True, "samplers": ["top_k"]}).json()
    expected = ids_of(coder, f"<|fim_prefix|>{BEFORE}(<|fim_suffix|>{AFTER}<|fim_middle|>")
    assert asked(coder) == expected
    timings = InfillTimings(**answer.pop("timings"))
    assert timings.prompt_n == len(expected)
    assert timings.predicted_n == answer["tokens_predicted"]
    num = len(ids_of(coder, "x + 1")) + 1
    assert answer == {
        "content": "x + 1", "stop": True, "model": "test/model", "tokens_predicted": num, "truncated": False,
        "tokens_evaluated": len(expected), "tokens_cached": len(expected) + num, "stop_type": "eos",
        "stopping_word": "", "index": 0,
    }  # fmt: skip
    found = events(post(coder, "/infill", body | {"stream": True, "stop": ["+"]}))
    assert "".join(event["content"] for event in found) == "x "
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1]["stop_type"], found[-1]["stopping_word"]) == ("word", "+")
    picked = post(coder, "/infill", body | {"response_fields": ["content", "timings/prompt_n", "none"]}).json()
    assert picked == {"content": "x + 1", "timings/prompt_n": len(expected)}
    warmed = post(coder, "/infill", body | {"n_predict": 0}).json()
    assert warmed["content"] == ""
    assert post(coder, "/infill", body | {"n_predict": 1}).json()["stop_type"] == "limit"


def test_infill_with_other_files(coder: LiveServer) -> None:
    extra = [{"filename": "a.py", "text": "A = 1"}, {"filename": "b.py", "text": "B = 2\n"}]
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": extra, "n_predict": 4}
    assert post(coder, "/infill", body).status == 200
    assert coder.tokenizer.decode(asked(coder)) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n<|file_sep|>filename\n"
        f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    )
    answer = post(coder, "/infill", body | {"input_prefix": "x = 1\n" * 2000}).json()  # more than the context
    assert answer["truncated"]
    assert len(asked(coder)) <= 512 - 4


def test_what_cannot_be_enforced_is_checked_at_the_end(coder: LiveServer) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "json_schema": {"type": "array", "uniqueItems": True}}
    for said in ("[1, 1]", "[1, 2]"):
        coder.says(said)
        whole = post(coder, "/infill", body).json()
        *_, streamed = events(post(coder, "/infill", body | {"stream": True}))
        for told in (whole, streamed):
            assert ("non-unique" in told.get("schema_error", "")) == (said == "[1, 1]")


@pytest.mark.parametrize(
    "body",
    [
        {"input_prefix": "a"},
        {"input_prefix": "a", "input_suffix": "b", "prompt_logprobs": 1},
        {"input_prefix": "a", "input_suffix": "b", "truncate_prompt_tokens": 5},
        {"input_suffix": "a"},
        {"input_prefix": "a", "input_suffix": "b", "n": 2},
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x"}] * 1025},
        {"input_prefix": "a", "input_suffix": "b", "input_extra": "x"},
    ],
)
def test_refusals(coder: LiveServer, body: dict[str, Any]) -> None:
    error_of(post(coder, "/infill", body), 400)


def test_a_model_that_cannot(live: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        error = error_of(post(live, path, body), 400)
        assert error["code"] == "unsupported_parameter"
        assert "no tokens for filling in the middle" in error["message"]
        assert "Qwen2.5-Coder" in error["message"]
    refused = post(live, "/api/generate", {"prompt": "a", "suffix": "b"})
    assert (refused.status, "does not support insert" in refused.json()["error"]) == (400, True)
    assert get(live, "/health").status == 200


def test_the_table_names_each_token_once() -> None:
    assert len({marks.prefix for marks in FORMATS}) == len(FORMATS)
