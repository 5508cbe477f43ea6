"""Token ids to text: never half a character, equal to the library's whole decode."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import Prepend, Replace, Sequence

from penstock.frontend.text.tokenizer import StreamDetokenizer, TextTokenizer, load_tokenizer, spelling_kind
from penstock.models.finding.registry import open_checkpoint
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.http_client import chat, chat_text, events
from tests.frontend.live_server import LiveServer

EMOJI = "a \U0001f600 \u00e9\u4e2d\u6587 \U0001f469\u200d\U0001f680 z"


def space_mark_tokenizer() -> Tokenizer:
    """Like Llama 2's: `\u2581` for spaces, `<0xNN>` for bytes without a piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "c", "\u2581a", "bc", "\u00e9"]
    merges = [("\u2581", "a"), ("b", "c")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(checkpoint: Path) -> TextTokenizer:
    return load_tokenizer(open_checkpoint(checkpoint))


def streamed(tokenizer: TextTokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 380), max_size=30), skip=st.booleans())
def test_any_ids_equal_the_whole_decode(byte_level: TextTokenizer, ids: list[int], skip: bool) -> None:
    """Also for runs of bytes that are no UTF-8."""
    expected = byte_level.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(byte_level, ids, skip_special_tokens=skip)) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(byte_level: TextTokenizer, text: str) -> None:
    pieces = streamed(byte_level, byte_level.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_all_pairs_of_bytes(byte_level: TextTokenizer) -> None:
    byte_ids = [byte_level.encode(chr(c), add_special_tokens=False)[-1] for c in range(128)]
    byte_ids += [i for i in range(3, 259) if i not in byte_ids]
    for first in byte_ids:
        for second in byte_ids:
            assert "".join(streamed(byte_level, [first, second])) == byte_level.decode([first, second])


def test_invalid_bytes_for_ever_stay_cheap(byte_level: TextTokenizer) -> None:
    """Bytes that can never become characters are shown as U+FFFD when that is certain, not hoarded."""
    [first, *_] = byte_level.encode("\u4e2d", add_special_tokens=False)
    detokenizer = byte_level.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.feed(first) for _ in range(10_000)]
    assert pieces[0] == ""
    assert set(pieces[1:]) == {"\ufffd"}


def test_space_marks_and_byte_pieces(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        open_checkpoint(write_checkpoint(tmp_path, tokenizer=_with_chatml(space_mark_tokenizer())))
    )
    text = "abc a \U0001f600\u00e9 bc"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == " " + text  # what continues a prompt keeps its space
    assert tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_other_decoders_go_through_the_library() -> None:
    pieces = ["[UNK]", "play", "##ing", "##ed", "a"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    detokenizer = TextTokenizer(tokenizer, {}).detokenizer(skip_special_tokens=True)
    assert isinstance(detokenizer, StreamDetokenizer)
    ids = [4, 1, 2, 1, 3]
    assert (
        "".join(detokenizer.feed(i) for i in ids) + detokenizer.flush() == tokenizer.decode(ids) == "a playing played"
    )


def test_spelling_is_recognised() -> None:
    assert spelling_kind({"type": "ByteLevel"}) == "byte_level"
    assert spelling_kind({"type": "Metaspace", "replacement": "\u2581"}) == "space_mark"
    assert spelling_kind({"type": "Metaspace", "replacement": "_"}) == "other"
    assert spelling_kind({"type": "Sequence", "decoders": [{"type": "Fuse"}]}) == "other"
    assert spelling_kind({"type": "WordPiece"}) == "other"
    assert spelling_kind(None) == "other"


def test_streams_are_valid_at_every_chunk(live: LiveServer) -> None:
    ids = live.tokenizer.encode(EMOJI, add_special_tokens=False)
    assert len(ids) > len(EMOJI)  # characters are split over tokens
    for per_step in (1, 2, 3):
        live.gives(ids, per_step=per_step)
        found = events(chat(live, stream=True))
        assert chat_text(found) == EMOJI
        assert "\ufffd" not in str(found)
    live.gives(ids[:-3])
    assert chat(live).json()["choices"][0]["message"]["content"] == live.tokenizer.decode(ids[:-3])


def test_an_unfinished_character_at_the_end(live: LiveServer) -> None:
    ids = live.tokenizer.encode("a\U0001f600", add_special_tokens=False)
    live.gives(ids[:-1])
    assert chat_text(events(chat(live, stream=True))) == "a\ufffd"
    assert chat(live).json()["choices"][0]["message"]["content"] == "a\ufffd"


def test_special_tokens_are_skipped_or_shown(live: LiveServer) -> None:
    ids = live.tokenizer.encode("Water", add_special_tokens=False)
    live.gives([*ids, 1, *ids], finish="length")
    assert chat(live).json()["choices"][0]["message"]["content"] == "WaterWater"
    shown = chat(live, skip_special_tokens=False).json()["choices"][0]["message"]["content"]
    assert shown == "Water<|im_start|>Water"


def test_random_splits_of_deltas(live: LiveServer) -> None:
    rng = random.Random(7)
    ids = [rng.randrange(3, 380) for _ in range(120)]
    expected = live.tokenizer.decode(ids)
    for per_step in (1, 5, 120):
        live.gives(ids, per_step=per_step, finish="length")
        assert chat_text(events(chat(live, stream=True, ignore_eos=True))) == expected
        assert chat(live, ignore_eos=True).json()["choices"][0]["message"]["content"] == expected


def _with_chatml(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    return tokenizer
