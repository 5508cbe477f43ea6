"""The container, against the `gguf` package; and what is said of files that are damaged or not supported."""

import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.cli.__main__ import main
from penstock.config import ConfigError
from penstock.models.check import check_checkpoint
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.gguf.container import Strings, gguf_models, read_container
from penstock.models.gguf.keys import _shortest
from penstock.models.gguf.tokenizer import GGUFTokenizer
from tests.models.broken_checkpoints import check_sentence
from tests.models.gguf.written import add_llama, add_model, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", add_model)


def test_everything_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_model(writer)
        for kind, value in {
            "uint8": 200, "int8": -3, "uint16": 60000, "int16": -30000, "uint32": 1 << 31, "int32": -5,
            "uint64": 1 << 40, "int64": -(1 << 40), "float32": 0.5, "float64": 0.1, "bool": True,
        }.items():  # fmt: skip
            getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        writer.add_string("x.string", "größer ☃")
        writer.add_array("x.floats", [1.0, 2.5])
        writer.add_array("x.flags", [True, False])
        writer.add_tensor("x", np.arange(24, dtype=np.float16).reshape(2, 3, 4))

    path = write(tmp_path / "model.gguf", fill)
    theirs = gguf.GGUFReader(path)
    ours = read_container(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(its) if isinstance(its, Strings) else its for name, its in ours.metadata.items()} == expected
    for tensor in theirs.tensors:
        its = ours.tensors[tensor.name]
        assert (its.shape, its.dtype) == (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type.name)
        assert bytes(its.read()) == tensor.data.tobytes()
    assert len(ours.tensors) == len(theirs.tensors)


def test_a_file_that_was_written_in_parts(tmp_path: Path, model: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    write(parts / "model.gguf", add_model, split_max_tensors=8)
    names = sorted(path.name for path in parts.iterdir())
    assert names == [f"model-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert gguf_models([*names, "mmproj-model.gguf"]) == names[:1]
    whole = {name: bytes(its.read()) for name, its in read_container(model).tensors.items()}
    for given in (parts, *(parts / name for name in names)):  # the folder, or any part
        checkpoint = open_checkpoint(given)
        check_checkpoint(checkpoint)
        assert len(checkpoint.tensors()) == len(whole)
    assert {name: bytes(its.read()) for name, its in read_container(parts / names[1]).tensors.items()} == whole
    (parts / names[2]).unlink()
    with pytest.raises(LoadError, match=r"one of 3 parts, of which model-00003-of-00003.gguf is missing"):
        check_checkpoint(open_checkpoint(parts))


def test_a_folder_with_several_models(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "other.gguf", add_model)
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: name one of them, such as '.*model\.gguf'"):
        open_checkpoint(tmp_path)


def _without(*names: str) -> Callable[[Path], object]:
    return lambda path: write(path, partial(add_model, without=names))


def _patched(at: int, data: bytes) -> Callable[[Path], object]:
    def patch(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at : at + len(data)] = data
        path.write_bytes(content)

    return patch


def _other_architecture(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"))


def _type_of_first_tensor(number: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = path.read_bytes()
        name = b"token_embd.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        _patched(at, struct.pack("<I", number))(path)

    return change


_BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "empty": (lambda path: path.write_bytes(b""), ("empty", "download")),
    "another kind of file": (_patched(0, b"PK\3\4"), ("no GGUF file",)),
    "a Git LFS pointer": (lambda path: path.write_text("version https://git-lfs\n"), ("Git LFS", "git lfs pull")),
    "version 1": (_patched(4, b"\1\0\0\0"), ("version 1", "2 and 3")),
    "big-endian": (_patched(4, b"\0\0\0\3"), ("big-endian",)),
    "cut off in the header": (lambda path: path.write_bytes(path.read_bytes()[:900]), ("cut off", "download")),
    "cut off in a tensor": (lambda path: path.write_bytes(path.read_bytes()[:-100]), ("cut off", "download")),
    "more keys than there are": (_patched(16, b"\xff" * 8), ("cut off or damaged",)),
    "another architecture": (_other_architecture, ("mamba", "not supported", "llama, mistral3")),
    "a type of blocks that is not read": (_type_of_first_tensor(16), ("IQ2_XXS", "token_embd", "Q4_K")),
    "an unknown type of blocks": (_type_of_first_tensor(99), ("number 99",)),
    "no size": (_without("embedding_length"), ("llama.embedding_length",)),
    "no norm": (_without("eps"), ("layer_norm_rms_epsilon", "lacks")),
    "no embedding": (_without("token_embd"), ("token_embd.weight", "lacks")),
    "a layer's weight is missing": (_without("blk.1.attn_k"), ("model.layers.1.self_attn.k_proj.weight", "lacks")),
    "no tokenizer": (lambda path: write(path, add_llama), ("tokenizer",)),
}


@pytest.mark.parametrize(("spoil", "words"), _BROKEN.values(), ids=_BROKEN)
def test_the_command_says_one_sentence(
    model: Path, spoil: Callable[[Path], object], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    check_checkpoint(open_checkpoint(model))
    spoil(model)
    assert main(["serve", str(model)]) == 2
    said = capsys.readouterr().err
    check_sentence(said.removeprefix("penstock: ").removesuffix("\n"))
    assert [word for word in words if word not in said] == [], said


def test_no_damage_has_another_error(model: Path, tmp_path: Path) -> None:
    """Any byte of the header may be wrong, or the last one that came."""
    content = model.read_bytes()
    header = content.index(b"blk.1.attn_v.weight")
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    for at in generator.integers(0, header, 100).tolist():
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(generator.integers(8))
        for data in (damaged, content[:at]):
            path.write_bytes(data)
            said = ""
            try:
                check_checkpoint(open_checkpoint(path))
            except ConfigError as error:
                said = str(error)
            assert len(said.splitlines()) <= 1


@pytest.mark.parametrize("number", [1e300, -1e300, float("inf"), float("nan")])
def test_a_number_beyond_fp32_stays_what_it_is(number: float) -> None:
    assert repr(_shortest(number)) == repr(number)
    assert _shortest(0.10000000149011612) == 0.1


@pytest.mark.parametrize("kind", [8, 6])
def test_an_array_beyond_all_vocabularies_is_refused_before_it_is_made(tmp_path: Path, kind: int) -> None:
    """In a sparse file, which has room for it."""
    path = tmp_path / "sparse.gguf"
    header = (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, 1 << 29)
    )
    path.write_bytes(header)
    os.truncate(path, 1 << 32)
    with pytest.raises(ConfigError, match="at most 8388608 are read"):
        read_container(path)


def test_a_vocabulary_whose_merges_cannot_be_found_is_refused() -> None:
    tokens = ["a", "b", "ab" * 50_000]
    data = b"".join(struct.pack("<Q", len(token)) + token.encode() for token in tokens)
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Strings(memoryview(data), 0, len(tokens)),
    }
    with pytest.raises(ConfigError, match="too long tokens"):
        GGUFTokenizer(fields, "llama")._merges()
    fields["tokenizer.chat_template"] = "x" * (1 << 21)
    with pytest.raises(ConfigError, match="at most 1048576 are read"):
        GGUFTokenizer(fields, "llama").chat_template()
