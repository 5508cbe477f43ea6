"""Towers that transformers computes: from pictures to tokens, with the checkpoint's own processor."""

import gc
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.gpu_worker.startup.start import start
from penstock.ipc.messages import PixelRef, PixelTensor
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.images.child.foreign import ForeignProcessor
from penstock.parts.images.families import image_family_of
from penstock.parts.images.frontend.prompt import expanded, with_placeholders
from penstock.parts.images.messages import DropEmbedding, EncodeImage
from penstock.parts.images.options import ImageOptions
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.engine_in_process import make_config
from tests.gpu_worker.families import test_images
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.foreign_eyes import FOREIGN_EYES, write
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.families.schedules import schedules
from tests.parts.images.image_models import noise

_SIZES = ((30, 20), (12, 44), (28, 28))
_TEXTS = ("Water {0} runs", "The gate {1}{0} opens, {2} slowly.", "hello world", "fine {2}")


class Seen(NamedTuple):
    """As `Picture`, with all that a processor makes."""

    pixels: dict[str, Tensor]
    grid: tuple[int, ...]
    num_embeddings: int
    places: list[int]
    key: bytes


class Checkpoint:
    """A checkpoint, the prompts that our frontend makes, and what transformers makes of the same."""

    def __init__(self, folder: Path, name: str) -> None:
        self.eyes = eyes = FOREIGN_EYES[name]
        self.model, self.token = write(folder, name)
        self.reference = _Reference(folder, eyes.text, self.model)
        if not eyes.has_old_names:
            self.model.save_pretrained(folder, save_original_format=False)
        checkpoint = open_checkpoint(folder)
        family = image_family_of(checkpoint)
        assert family is not None
        assert family.mark == eyes.mark
        self.made = ForeignProcessor(checkpoint, family)
        self.oracle: Any = self.made._processor
        drawn = [noise(*size, seed) for seed, size in enumerate(_SIZES)]
        self.prompts = [self._prompt(text, drawn, eyes.mark, eyes.around) for text in _TEXTS]
        self.reference.known = self.prompts

    def _prompt(self, text: str, drawn: list[Image.Image], mark: str, around: tuple[str, str]) -> test_images.Prompt:
        shown = [drawn[int(part[0])] for part in text.split("{")[1:]]
        for number in range(len(drawn)):
            text = text.replace(f"{{{number}}}", mark.join(around))
        read = [self.made.process(image) for image in shown]
        placeholders = [image.placeholder for image in read]
        short = self.oracle.tokenizer(with_placeholders(text, mark, placeholders), add_special_tokens=False)
        ids, spans = expanded(short["input_ids"], self.token, placeholders)
        theirs = (
            {} if not shown else self.oracle(text=[text], images=shown, return_tensors="pt", add_special_tokens=False)
        )
        if shown:
            others = self.oracle.tokenizer.convert_tokens_to_ids(list(self.eyes.other_tokens))
            assert [self.token if each in others else each for each in theirs["input_ids"][0].tolist()] == ids
        self.reference.inputs[tuple(ids)] = {
            key: value.float() if value.dtype == torch.bfloat16 else value
            for key, value in theirs.items()
            if key != "attention_mask"
        }
        pictures = [
            Seen(
                {key: torch.from_numpy(np.array(value)) for key, value in image.tensors.items()},
                image.placeholder.grid,
                span.num_embeddings,
                ids[span.start : span.start + span.length],
                image.key,
            )
            for image, span in zip(read, spans, strict=True)
        ]
        return test_images.Prompt(ids, tuple(pictures), tuple(span.start for span in spans))  # type: ignore[arg-type]


class _Reference(test_images.SeeingReference):
    """With the inputs that transformers' own processor makes of a whole prompt."""

    def __init__(self, *args: Any) -> None:
        Reference.__init__(self, *args)
        self.known: list[test_images.Prompt] = []
        self.inputs: dict[tuple[int, ...], dict[str, Tensor]] = {}

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        prompt = next(each for each in self.known if text[: len(each.ids)] == each.ids)
        its = dict(self.inputs[tuple(prompt.ids)])
        if (ids := its.pop("input_ids", None)) is not None:
            text = [*ids[0].tolist(), *text[len(prompt.ids) :]]
        more = len(text) - len(prompt.ids)
        its = {
            name: torch.cat((value, value.new_zeros(1, more)), 1) if name.endswith("token_type_ids") else value
            for name, value in its.items()
        }
        ids = torch.tensor([text])
        logits: Tensor = self.model(ids, attention_mask=torch.ones_like(ids), **its).logits[0]
        return logits


class Seeing(test_images.Seeing):
    """With pictures that have several tensors."""

    def encode(self, picture: Any, embedding_id: int, key: bytes) -> None:
        self.store.order(EncodeImage(embedding_id, key, picture.grid, picture.num_embeddings, _inline(picture.pixels)))
        encoded, parts = None, 0
        while encoded is None:
            encoded, parts = self.store.encode(0.0), parts + 1
        assert not encoded.error
        assert parts > 1, "it stops within the tower"


def _inline(pixels: dict[str, Tensor]) -> PixelRef:
    data, tensors = b"", []
    for name, its in pixels.items():
        data += bytes(-len(data) % 64)
        tensors.append(PixelTensor(name, str(its.dtype).removeprefix("torch."), tuple(its.shape), len(data)))  # type: ignore[arg-type]
        data += its.numpy().tobytes()
    return PixelRef("", len(data), tuple(tensors), data)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gpu_worker.models.vision.foreign._PART_SECONDS", 0.0)
    monkeypatch.setattr(test_images, "Seeing", Seeing)
    monkeypatch.setattr(test_images, "_key", lambda picture: picture.key)
    monkeypatch.setattr(test_images, "inline", _inline)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("name", FOREIGN_EYES)
def test_greedy(tmp_path: Path, name: str) -> None:
    if FOREIGN_EYES[name].needs_torchvision:
        pytest.importorskip("torchvision")
    made = Checkpoint(tmp_path, name)
    turn = list(FOREIGN_EYES).index(name)
    for run in schedules(turn)[: None if IS_SOAK else 1]:
        if least := FOREIGN_EYES[name].least_budget:
            run = run._replace(budget=max(run.budget, least), tight=False)
        kernels = ("native", "torch")[turn % 2]
        test_images.check(made.reference, made.prompts, run, model_impl="own", cpu_kernels=kernels, max_num_seqs=4)


def _towers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tower"]


def test_a_picture_that_nobody_wants_any_more_leaves_nothing(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path, "internvl")
    store = Seeing(tmp_path, made.prompts, model_impl="own").store
    picture: Any = made.prompts[0].pictures[0]
    message = EncodeImage(1, picture.key, picture.grid, picture.num_embeddings, _inline(picture.pixels))
    store.order(message)
    assert store.encode(0.0) is None
    assert len(_towers()) == 1
    store.order(DropEmbedding(1))
    gc.collect()
    assert not _towers()


def test_other_numbers_of_embeddings_are_refused(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path, "internvl")
    store = Seeing(tmp_path, made.prompts, model_impl="own").store
    picture: Any = made.prompts[0].pictures[0]
    right = _inline(picture.pixels)
    count = picture.num_embeddings
    bad = (
        EncodeImage(1, picture.key, (count + 1,), count + 1, right),
        EncodeImage(2, picture.key, (count + 1,), count, right),
        EncodeImage(3, picture.key, (count, 1), count, right),
        EncodeImage(4, picture.key, (count,), count, replace(right, tensors=())),
    )
    for message in (*bad, EncodeImage(5, picture.key, (count,), count, right)):
        store.order(message)
        while (encoded := store.encode(1.0)) is None:
            pass
        assert bool(encoded.error) == (message.embedding_id < 5), message.embedding_id
    assert not _towers()


def test_a_tower_that_is_not_wanted_or_not_there_is_not_loaded(tmp_path: Path) -> None:
    """Then texts are answered all the same."""
    made = Checkpoint(tmp_path, "internvl")
    config = make_config(tmp_path, model_impl="own")
    blind = start(config.with_options(ImageOptions(max_images=0)))
    assert not blind.hello.max_embedding_bytes
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: its for name, its in weights.items() if "language_model" in name}, tmp_path / "model.safetensors")
    engine = Scored(tmp_path, model_impl="own")
    assert not engine.hello.max_embedding_bytes
    text = made.prompts[2].ids
    (answer,) = engine.answers([text])
    assert not made.reference.errors(text, answer)
