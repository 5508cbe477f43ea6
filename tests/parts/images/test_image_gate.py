"""Images: every sequence sees its own, whatever is shared, cached, evicted, chunked or lost; each is encoded once."""

from array import array
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import replace as with_fields
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.step_record import DISK, IMAGE
from penstock.core.scheduling.suspects import suspect_ids
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.messages import AddRequest, ImageRef, PixelRef
from penstock.ipc.page_keys import image_marks, short_keys
from penstock.parts.disk.scheduler import moves as disk_moves
from penstock.parts.images.messages import DropEmbedding, ImageEncoded
from penstock.parts.images.scheduler import ImageGate
from penstock.parts.recording.lines import Encoded
from tests.core.driver import EMBEDDING_BYTES, Driver, make_limits, make_request
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_scheduler_traces import random_limits, random_requests, random_trace
from tests.parts.disk.test_disk_moves import quiet, restarted, run_alone, with_disk
from tests.parts.host.test_host_moves import with_host
from tests.parts.recording.test_recorder import RecordedDriver

PLACEHOLDER = 7


def image(name: str, start: int, length: int) -> ImageRef:
    key = name.encode().ljust(32) if name.startswith("bad") else blake2b(name.encode(), digest_size=32).digest()
    return ImageRef(key, start, length, length, (1, 1, length), PixelRef("", 4, (), b"1234"))


def shows(request_id: str, prompt: list[int], *images: ImageRef, max_tokens: int = 3, **fields: object) -> AddRequest:
    """A request whose prompt has placeholders where its images are."""
    prompt = prompt[:]
    for each in images:
        prompt[each.start : each.start + each.length] = [PLACEHOLDER] * each.length
    return replace(make_request(request_id, prompt, max_tokens, **fields), images=images)  # type: ignore[arg-type]


def seeing(make: Callable[[Random], WorkerLimits], *, are_whole: bool = False) -> Callable[[Random], WorkerLimits]:
    def make_limits(rng: Random) -> WorkerLimits:
        limits = make(rng)
        most = rng.choice([1, 2, 8]) * limits.max_sequence_len * EMBEDDING_BYTES
        limits = with_fields(limits, max_embedding_bytes=most, images_are_whole=are_whole)
        return with_fields(limits, max_num_batched_tokens=200) if are_whole else limits

    return make_limits


def with_images(rng: Random, limits: WorkerLimits) -> deque[AddRequest]:
    """Of few contents and few places, so that equal placeholders often stand for other images."""
    found: deque[AddRequest] = deque()
    stem = [rng.randrange(limits.vocab_size) for _ in range(limits.max_sequence_len)]
    for request in random_requests(rng, limits):
        prompt = list(array("i", request.prompt_token_ids))
        if rng.random() < 0.8:
            prompt = stem[: len(prompt)]
        images: list[ImageRef] = []
        position = rng.choice([0, 1, 4])
        while rng.random() < 0.7:
            length = rng.choice([1, 3, 4, 9])
            if position + length > len(prompt):
                break
            name = rng.choice(["cat", "dog", "cow", "bad" if rng.random() < 0.05 else "cat"])
            images.append(image(f"{name}{length}", position, length))
            position += length + rng.choice([0, 1, 4])
        for each in images:
            prompt[each.start : each.start + each.length] = [PLACEHOLDER] * each.length
        sampling = replace(request.sampling, prompt_logprobs=-1, num_logprobs=-1)
        tokens = array("i", prompt).tobytes()
        found.append(replace(request, prompt_token_ids=tokens, sampling=sampling, images=tuple(images)))
    return found


KINDS = {
    "pages": seeing(random_limits),
    "whole": seeing(random_limits, are_whole=True),
    "windows": seeing(window_limits),
    "whole in windows": seeing(window_limits, are_whole=True),
    "host": seeing(with_host(random_limits)),
    "disk": seeing(with_disk(random_limits)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sequence_sees_its_own_images(kind: str) -> None:
    for seed in range(16):
        try:
            random_trace(seed, KINDS[kind], make_requests=with_images)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_same_image_is_encoded_once_and_not_at_all_if_its_pages_are_cached() -> None:
    driver = Driver(make_limits(max_embedding_bytes=1000))
    prompt = list(range(100, 120))
    driver.add(shows("a", prompt, image("cat", 2, 9)))
    driver.add(shows("b", prompt[::-1], image("cat", 5, 9), image("cat", 14, 2)))  # another length: the same key
    driver.run()
    assert driver.worker.num_encoded == 1
    driver.add(shows("c", prompt, image("cat", 2, 9)))
    driver.run()
    assert (driver.worker.num_encoded, driver.num_cached["c", 0]) == (1, 16)
    driver.add(shows("d", prompt, image("dog", 2, 9)))
    driver.run()
    assert (driver.worker.num_encoded, driver.num_cached["d", 0]) == (2, 0), "placeholders alone share nothing"


def test_a_flood_waits_for_itself() -> None:
    """Its images are under way a few at a time, others are served meanwhile, and another tenant's comes next."""
    driver = Driver(make_limits(max_num_seqs=4, max_embedding_bytes=90 * EMBEDDING_BYTES))
    for i in range(20):
        driver.add(shows(f"flood{i}", list(range(20)), image(f"{i}", 0, 9), tenant="flood"))
    driver.schedule()
    num_asked = len(driver.worker.to_encode)
    driver.add(make_request("text", range(8), 4, tenant="other"))
    driver.add(shows("seen", list(range(30, 50)), image("seen", 0, 9), tenant="other"))
    while ("text", 0) not in driver.finished:  # nothing is encoded meanwhile
        if driver.schedule() is None:
            driver.execute()
            driver.process()
    num_before = 0
    while ("seen", 0) not in driver.outputs:
        num_before += driver.worker.num_encoded
        assert driver.step()
    done = {name for name, _ in driver.finished}
    assert (num_asked, len(done & {f"flood{i}" for i in range(20)}) <= 8) == (4, True)
    driver.run()
    assert driver.worker.num_encoded == 21


def test_what_cannot_be_computed_is_refused() -> None:
    prompt = list(range(20))
    for limits, images, reason in (
        (make_limits(), [image("cat", 0, 4)], "computes none"),
        (make_limits(max_embedding_bytes=39), [image("cat", 0, 4)], "at most 3 fit"),
        (make_limits(max_embedding_bytes=999), [image("cat", 0, 4), image("dog", 3, 4)], "overlaps"),
        (make_limits(max_embedding_bytes=999), [image("cat", 18, 4)], "ends at position 22"),
        (
            make_limits(max_embedding_bytes=999, images_are_whole=True, max_num_batched_tokens=16),
            [image("cat", 0, 9)],
            "at most 8 fit a step",
        ),
    ):
        refusal = Driver(limits).add(replace(make_request("a", prompt, 3), images=tuple(images)))
        assert refusal is not None
        assert reason in refusal.reason


def test_an_image_that_ends_workers_is_found_and_others_live() -> None:
    driver = Driver(make_limits(max_embedding_bytes=1000))
    driver.add(shows("a", list(range(20)), image("cat", 0, 9)))
    driver.schedule()
    driver.reset_worker()  # while it encodes
    driver.add(make_request("text", range(8), 4))
    driver.schedule()
    while driver.plans or driver.results:
        driver.execute()
        driver.process()
        driver.schedule()
    assert driver.scheduler.is_on_trial
    driver.reset_worker()
    assert driver.finished["a", 0].error_code == "ends_workers"
    driver.run()
    assert len(driver.outputs["text", 0]) == 4


def worker_that_dies_of(driver: Driver, key: bytes) -> bool:
    """Let the worker encode what it is asked for, in order; return whether it died of this image."""
    while driver.worker.to_encode:
        if driver.worker.to_encode[0].key == key:
            driver.reset_worker()
            return True
        driver.prepare()
    return False


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("num_deaths_elsewhere", [0, 1])
def test_one_of_several_images_is_found_at_the_second_death(place: int, num_deaths_elsewhere: int) -> None:
    """However many images come before it, and wherever the first death was."""
    names = ["cat", "dog", "cow"]
    names[place] = "kills"
    images = [image(name, 6 * i, 5) for i, name in enumerate(names)]
    driver = Driver(make_limits(max_embedding_bytes=1000))
    driver.add(replace(shows("a", list(range(20)), *images), num_deaths=num_deaths_elsewhere))
    num_deaths = 0
    for _ in range(12):
        driver.schedule()
        driver.take_orders()
        num_deaths += worker_that_dies_of(driver, images[place].key)
        if ("a", 0) in driver.finished:
            break
    assert driver.finished["a", 0].error_code == "ends_workers"
    assert num_deaths + num_deaths_elsewhere == 2


def test_an_answer_may_die_with_the_worker() -> None:
    """It has embedded the first image, and dies of the second one before anybody hears of the first."""
    images = [image("cat", 0, 5), image("kills", 6, 5)]
    driver = Driver(make_limits(max_embedding_bytes=1000))
    driver.add(shows("a", list(range(20)), *images))
    driver.schedule()
    driver.take_orders()
    driver.reset_worker()
    num_deaths = 1
    for _ in range(12):
        driver.schedule()
        driver.take_orders()
        num_deaths += worker_that_dies_of(driver, images[1].key)
        if ("a", 0) in driver.finished:
            break
    assert driver.finished["a", 0].error_code == "ends_workers"
    assert num_deaths == 2


def test_suspected_images_are_named_to_other_engines() -> None:
    """The one that was made, and the one behind it: an answer may have died with the worker."""
    driver = Driver(make_limits(max_embedding_bytes=1000))
    driver.add(shows("a", list(range(20)), image("cat", 0, 5), image("kills", 6, 5)))
    driver.add(shows("b", list(range(20)), image("dog", 0, 5)))
    driver.add(shows("c", list(range(20)), image("cow", 0, 5)))
    driver.schedule()
    assert worker_that_dies_of(driver, image("kills", 6, 5).key)
    scheduler = driver.scheduler
    named = suspect_ids(scheduler.suspects, scheduler.requests.values(), scheduler.trials, scheduler.parts)
    assert sorted(named) == ["a", "b"]


def test_an_image_that_one_rank_cannot_embed_is_dropped_by_all() -> None:
    driver = Driver(make_limits(max_embedding_bytes=1000))
    driver.add(shows("a", list(range(20)), image("cat", 0, 9)))
    driver.schedule()
    images = driver.scheduler.parts.get(ImageGate)
    assert images is not None
    [embedding_id] = images.embeddings()
    assert images.answered(ImageEncoded(embedding_id, error="it is lost"))
    assert list(images.take_before_plan()) == [DropEmbedding(embedding_id)]
    assert not images.answered(ImageEncoded(embedding_id)), "another rank has it later"
    assert len(images) == images.num_bytes == images.num_under_way == 0


def test_keys_of_pages_tell_images_and_their_places_apart() -> None:
    tokens = array("i", [PLACEHOLDER] * 12).tobytes()
    prompts = [[], [image("cat", 0, 6)], [image("dog", 0, 6)], [image("cat", 1, 6)], [image("cat", 6, 6)]]
    keys = [tuple(short_keys("", tokens, 4, image_marks(images, 4))) for images in prompts]
    assert len({key[-1] for key in keys}) == len(prompts)
    assert keys[0] == tuple(short_keys("", tokens, 4))
    assert keys[0][:1] == keys[4][:1], "before the image nothing differs"


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_recording_has_an_images_key_and_sizes_and_never_its_pixels(tmp_path: Path, with_tokens: bool) -> None:
    path = tmp_path / "recording"
    driver = RecordedDriver(path, make_limits(max_embedding_bytes=1000), record_prompts=with_tokens)
    cat = image("cat", 2, 9)
    inline = replace(cat.pixels, segment="a file", inline=b"the pixels themselves")
    driver.add(shows("a", list(range(20)), replace(cat, pixels=inline)))
    driver.schedule()
    images = driver.scheduler.parts.get(ImageGate)
    assert images is not None
    [embedding_id] = images.embeddings()
    for message in (ImageEncoded(embedding_id, 1234), ImageEncoded(embedding_id + 1, 1, "it is lost")):
        driver.recorder.on_made(images.recorded(message))
    driver.run()
    [run] = driver.read(path).runs
    made = [event for event in run.events if isinstance(event, Encoded)]
    assert [(each.num_embeddings, each.us, each.failed) for each in made] == [(9, 1234, False), (0, 1, True)]
    text = path.read_text()
    assert "a file" not in text
    assert b64encode(b"the pixels").decode()[:12] not in text
    assert (cat.key.hex() in text) == with_tokens
    assert '"images":[["' in text
    assert ",2,9,9,[1,1,9],4]" in text


def test_what_has_come_from_the_disk_is_no_reason_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request waits for an image by then."""
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 8)
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50, max_embedding_bytes=1000)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    disk = restarted(driver)
    driver.add(shows("again", prompt, image("cat", 44, 5)))
    driver.schedule()
    (request,) = driver.scheduler.requests.values()
    told = driver.scheduler.reasons().of_requests([request])[request]
    assert told.startswith(f"{DISK}: 11 pages, for at most "), told
    driver.move()
    driver.schedule()
    assert disk.fetches()
    assert driver.scheduler.reasons().of_requests([request])[request] == IMAGE
    driver.run()
