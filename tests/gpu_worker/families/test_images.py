"""Prompts with images: what transformers makes of the same pixels and prompt, in any chunks, batches and reuse."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from penstock.core.sequences.intake import Refusal
from penstock.gpu_worker.models.loading.vision import positions_by_share
from penstock.gpu_worker.models.vision.tower import Matrix
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc import shared_files
from penstock.ipc.messages import AddRequest, ImageRef, NewRow, PixelRef, PixelTensor, RowImage, StepPlan
from penstock.parts.images.messages import EncodeImage
from penstock.parts.images.worker.rows import Images
from penstock.parts.images.worker.store import EmbeddingStore, read_pixels
from tests.gpu_worker.engine_in_process import schedule
from tests.gpu_worker.families.checkpoints import Reference, config_of, spread
from tests.gpu_worker.families.eyes import BEGIN, END, EYES, IMAGE, Picture
from tests.gpu_worker.families.run import NUM_NEW, Scored
from tests.gpu_worker.families.schedules import IS_LONG, Schedule, schedules


class Prompt(NamedTuple):
    """Token ids with placeholders, and the pictures behind these."""

    ids: list[int]
    pictures: tuple[Picture, ...] = ()
    starts: tuple[int, ...] = ()  # of their placeholders


def prompt_of(text: list[int], *shown: Picture) -> Prompt:
    """The text, with the pictures between its words."""
    ids, starts = text[:5], []
    for i, picture in enumerate(shown):
        starts.append(len(ids) + 1)
        ids = [*ids, BEGIN, *picture.places, END, *text[5 + 4 * i : 9 + 4 * i]]
    return Prompt(ids + text[5 + 4 * len(shown) :], shown, tuple(starts))


def prompts(name: str) -> list[Prompt]:
    random = np.random.default_rng(5)
    first, second, third = EYES[name].pictures()
    texts = [random.integers(5, 180, 24).tolist() for _ in range(4)]
    return [
        prompt_of(texts[0], first),
        prompt_of(texts[1], second, first, third),
        prompt_of(texts[2]),
        prompt_of(texts[3], third),
    ]


class SeeingReference(Reference):
    """What transformers makes of prompts with pictures."""

    def __init__(self, folder: Path, name: str, known: list[Prompt]) -> None:
        self._eyes = eyes = EYES[name]
        case = eyes.case
        text = config_of(case)
        parts: dict[str, Any] = {"text_config": text.to_dict(), "vision_config": dict(eyes.vision), **eyes.more}
        parts |= {
            "tie_word_embeddings": getattr(text, "tie_word_embeddings", False),
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "vision_start_token_id": BEGIN,
            "vision_end_token_id": END,
        }
        config = transformers.CONFIG_MAPPING[eyes.kind](**parts)
        torch.manual_seed(2)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        model = model.float().eval()
        spread(model, case.wider)
        with torch.no_grad():
            model.get_output_embeddings().weight[IMAGE] = 0.0  # nothing that is generated is an image's place
        super().__init__(folder, case, model)
        self._prompts = known

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        prompt = next(each for each in self._prompts if text[: len(each.ids)] == each.ids)
        logits: Tensor = self.model(torch.tensor([text]), **self.of_pictures(prompt, text)).logits[0]
        return logits

    def of_pictures(self, prompt: Prompt, text: list[int]) -> dict[str, Tensor]:
        if not prompt.pictures:
            return {}
        return self._eyes.inputs(prompt.pictures, text)


class Seeing(Scored):
    """An engine whose worker is told of the pictures behind the placeholders."""

    def __init__(self, folder: Path, known: list[Prompt], **options: Any) -> None:
        super().__init__(folder, **options)
        self._known, self._made = known, dict[bytes, int]()
        launch = self.runner.launch

        def with_pictures(plan: StepPlan) -> PendingStep:
            return launch(replace(plan, new_rows=tuple(map(self._seeing, plan.new_rows))))

        setattr(self.runner, "launch", with_pictures)  # noqa: B010

    @property
    def store(self) -> EmbeddingStore:
        (images,) = (part for part in self.parts if isinstance(part, Images))
        return images.store

    def add_request(self, request: AddRequest) -> Refusal | None:
        if self.hello.images_are_whole:  # then the scheduler must know of them, and asks for them itself
            prompt = self._prompt(request.prompt_token_ids)
            refs = tuple(map(_ref, prompt.pictures, prompt.starts))
            request = replace(request, images=refs)
        return super().add_request(request)

    def _prompt(self, token_ids: bytes | memoryview) -> Prompt:
        ids = np.frombuffer(token_ids, np.int32).tolist()
        return next(each for each in self._known if ids[: len(each.ids)] == each.ids)

    def _seeing(self, new: NewRow) -> NewRow:
        if new.images:
            return new
        prompt = self._prompt(new.token_ids)
        return replace(
            new, images=tuple(self._image(*each) for each in zip(prompt.pictures, prompt.starts, strict=True))
        )

    def _image(self, picture: Picture, start: int) -> RowImage:
        key = _key(picture)
        if key not in self._made:
            self._made[key] = len(self._made) + 1
            self.encode(picture, self._made[key], key)
        return RowImage(key, start, len(picture.places), picture.num_embeddings, picture.grid, self._made[key])

    def encode(self, picture: Picture, embedding_id: int, key: bytes) -> None:
        self.store.order(EncodeImage(embedding_id, key, picture.grid, picture.num_embeddings, inline(picture.pixels)))
        encoded, most = None, 16 * 2 * _largest_products(self.store.tower)
        while encoded is None:
            with FlopCounterMode(display=False) as counted:
                encoded = self.store.encode(0.0)
            assert counted.get_total_flops() <= most, "a part is of 16 vectors here"
        assert not encoded.error
        assert encoded.embedding_id == embedding_id


def _largest_products(tower: Any) -> int:
    """Weights of the three largest matrices, which is at least what one part has."""
    found: list[int] = []

    def look(part: Any) -> None:
        if isinstance(part, Matrix):
            found.append(part.weight.numel())
        elif isinstance(part, tuple):
            for each in part:
                look(each)

    look(tower)
    return sum(sorted(found)[-3:])


def _key(picture: Picture) -> bytes:
    return hashlib.blake2b(picture.pixels.numpy().tobytes(), digest_size=32).digest()


def _ref(picture: Picture, start: int) -> ImageRef:
    length, count = len(picture.places), picture.num_embeddings
    return ImageRef(_key(picture), start, length, count, picture.grid, inline(picture.pixels))


def inline(pixels: Tensor) -> PixelRef:
    data = pixels.numpy().tobytes()
    return PixelRef("", len(data), (PixelTensor("pixel_values", "float32", tuple(pixels.shape), 0),), data)


def check(reference: SeeingReference, known: list[Prompt], run: Schedule, **options: Any) -> None:
    longest = max(len(prompt.ids) for prompt in known) + NUM_NEW
    shape = schedule(run.budget, run.page_size, run.depth, num_tokens=longest if run.tight else 800, cached=run.cached)
    engine = Seeing(reference.folder, known, **shape, **options)
    if groups := engine.hello.window_groups:  # as many pages more as the scheduler counts with for each window
        for_windows = sum(2 + -(-(group.window + run.page_size) // group.page_size) for group in groups)
        shape["num_pages"] += for_windows if run.tight else len(groups) * shape["num_pages"]
        engine = Seeing(reference.folder, known, **shape, **options)
    batches = [known] if run.together else [[prompt] for prompt in known]
    for _ in range(1 + run.cached):
        for batch in batches:
            for prompt, answer in zip(batch, engine.answers([prompt.ids for prompt in batch]), strict=True):
                assert len(answer.tokens) == NUM_NEW
                assert not (difference := reference.errors(prompt.ids, answer)), f"{run}: {difference}"


def _shared(pixels: PixelRef) -> str:
    """The name of a file with these, which is gone."""
    files = shared_files.SharedFiles(1 << 20)
    name = files.reserve(pixels.num_bytes)
    shared_files.write(name, [pixels.inline])
    assert torch.equal(
        read_pixels(replace(pixels, segment=name, inline=b""), "pixel_values"), read_pixels(pixels, "pixel_values")
    )
    files.close()
    return name


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers stop within layers, as they do with pictures of a usual size."""
    for limit in ("_PART", "_PART_NUMBERS"):
        monkeypatch.setattr(f"penstock.gpu_worker.models.vision.tower.{limit}", 1)


@pytest.mark.parametrize("name", EYES)
def test_greedy(tmp_path: Path, name: str) -> None:
    known = prompts(name)
    reference = SeeingReference(tmp_path, name, known)
    turn = list(EYES).index(name)
    for kernels in ("native", "torch"):
        runs = schedules(turn if kernels == "native" else turn + 2)
        for run in runs if IS_LONG or kernels == "native" else runs[:1]:
            check(reference, known, run, model_impl="own", cpu_kernels=kernels, max_num_seqs=4)


def test_pages_that_come_without_a_chunk_are_not_lost(tmp_path: Path) -> None:
    """Of those that an image needs at once, a full pool may give some, in a step that computes nothing."""
    known = prompts("gemma3")
    run = Schedule(budget=8, page_size=1, depth=1, cached=False, tight=True, together=True)
    check(SeeingReference(tmp_path, "gemma3", known), known, run, model_impl="own", cpu_kernels="torch", max_num_seqs=4)


def test_patches_of_idefics3_are_where_transformers_has_them(tmp_path: Path) -> None:
    """Of 25 in a row, rounding gives ten their neighbour's place."""
    config = transformers.Idefics3VisionConfig(hidden_size=8, num_attention_heads=1, image_size=25, patch_size=1)
    theirs = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        for parameter in theirs.patch_embedding.parameters():
            parameter.zero_()
    expected = theirs(torch.zeros(1, 3, 25, 25), torch.ones(1, 25, 25, dtype=torch.bool))[0]
    made = positions_by_share(theirs.position_embedding.weight, 25)
    torch.testing.assert_close(made, expected)
    assert not torch.equal(made, theirs.position_embedding.weight)


def test_generate_agrees(tmp_path: Path) -> None:
    known = prompts("qwen2.5-vl")
    reference = SeeingReference(tmp_path, "qwen2.5-vl", known)
    engine = Seeing(reference.folder, known, model_impl="own")
    prompt = known[1]
    (answer,) = engine.answers([prompt.ids])
    ids = torch.tensor([prompt.ids])
    generate: Any = reference.model.generate
    made = generate(
        ids,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        **reference.of_pictures(prompt, prompt.ids),
    )
    assert answer.tokens == made[0, len(prompt.ids) :].tolist()


def test_pictures_matter(tmp_path: Path) -> None:
    """Two pictures of one size, behind the same tokens, have other answers."""
    first, _, third = EYES["qwen2.5-vl"].pictures()
    text = np.random.default_rng(5).integers(5, 180, 24).tolist()
    answers = []
    other = first._replace(pixels=first.pixels.flip(0))
    for i, picture in enumerate((first, other)):
        known = [prompt_of(text, picture)]
        reference = SeeingReference(tmp_path / str(i), "qwen2.5-vl", known)
        answers.append(Seeing(reference.folder, known).answers([known[0].ids])[0].logprobs)
    assert answers[0] != answers[1]
    assert third.grid != first.grid


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    known = prompts("qwen2.5-vl")
    store = Seeing(SeeingReference(tmp_path, "qwen2.5-vl", known).folder, known).store
    picture = known[0].pictures[0]
    key, fitting = bytes(32), inline(picture.pixels)
    bad = (
        EncodeImage(1, key, picture.grid, picture.num_embeddings + 1, fitting),
        EncodeImage(2, key, (1, 3, 3), 2, fitting),
        EncodeImage(3, key, picture.grid, picture.num_embeddings, inline(picture.pixels[1:])),
        EncodeImage(4, key, picture.grid, picture.num_embeddings, replace(fitting, inline=fitting.inline[4:])),
        EncodeImage(5, key, picture.grid, picture.num_embeddings, replace(fitting, tensors=())),
    )
    gone = EncodeImage(
        6, key, picture.grid, picture.num_embeddings, replace(fitting, segment=_shared(fitting), inline=b"")
    )
    for message in (*bad, gone):
        store.order(message)
        encoded = store.encode(1.0)
        assert encoded is not None
        assert encoded.error
        assert encoded.is_lost == (message is gone)
    assert not store.is_busy
