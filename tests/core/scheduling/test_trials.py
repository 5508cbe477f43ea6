"""Grammars and images over which a worker has died: each is made alone the next time, and then either kills or not."""

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.suspects import suspect_ids
from penstock.core.scheduling.trials import Trials
from penstock.parts.grammars.messages import PrepareGrammar
from penstock.parts.images.scheduler import ImageGate
from tests.core.driver import Driver, hello, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.parts.images.test_image_gate import image, shows

PROMPT = list(range(20))
CAT, DOG, COW = image("cat", 2, 5), image("dog", 8, 5), image("cow", 14, 5)


def with_images(*suspected: bytes | str) -> Driver:
    driver = Driver(make_limits(max_embedding_bytes=1000))
    for key in suspected:
        driver.scheduler.trials.suspect(key)
    return driver


def with_grammars(*suspected: str) -> Driver:
    driver = Driver()
    for text in suspected:
        driver.scheduler.trials.suspect(text)
    return driver


def asked_images(driver: Driver) -> list[bytes]:
    """The images that the worker is asked for now."""
    driver.schedule()
    return [message.key for message in driver.worker.to_encode]


def asked_grammars(driver: Driver) -> list[str]:
    driver.schedule()
    return [message.grammar for message in driver.worker.asked]


# --- images -----------------------------------------------------------------------------------


def test_a_suspected_image_waits_for_those_under_way() -> None:
    driver = with_images(DOG.key)
    driver.add(shows("a", PROMPT, CAT))
    driver.add(shows("b", PROMPT, DOG))
    assert asked_images(driver) == [CAT.key]
    assert not driver.scheduler.is_on_trial, "meanwhile steps go on"
    driver.prepare()
    assert asked_images(driver) == [DOG.key]
    assert driver.scheduler.is_on_trial


def test_no_image_is_asked_for_beside_a_suspected_one() -> None:
    driver = with_images(DOG.key)
    for name, each in (("a", DOG), ("b", CAT), ("c", COW)):
        driver.add(shows(name, PROMPT, each))
    assert asked_images(driver) == [DOG.key]
    driver.prepare()
    assert asked_images(driver) == [CAT.key, COW.key]


def test_a_suspected_image_that_nobody_wants_any_more_holds_up_nothing() -> None:
    driver = with_images(DOG.key)
    driver.add(shows("a", PROMPT, DOG))
    driver.add(shows("b", PROMPT, CAT))
    assert asked_images(driver) == [DOG.key]
    driver.abort("a")
    assert not driver.scheduler.is_on_trial
    driver.run()
    assert ("b", 0) in driver.finished


def test_an_image_that_was_embedded_alone_is_cleared() -> None:
    driver = with_images(DOG.key)
    driver.add(shows("a", PROMPT, DOG))
    driver.run()
    images = driver.scheduler.parts.get(ImageGate)
    assert images is not None
    assert not driver.scheduler.trials.is_suspected(DOG.key)
    images.drop_unused()
    driver.add(shows("b", PROMPT[::-1], CAT))
    driver.add(shows("c", PROMPT[::-1], DOG))
    assert asked_images(driver) == [CAT.key, DOG.key], "together with others again"


def test_what_a_worker_was_making_is_forgotten_with_it_even_if_the_next_one_makes_nothing() -> None:
    driver = with_images()
    driver.add(shows("a", PROMPT, CAT))
    assert asked_images(driver) == [CAT.key]
    driver.abort("a")
    assert driver.scheduler.trials.is_unsure, "it may still be made"
    driver.scheduler.reset_worker(hello(make_limits()), has_died=False)
    assert not driver.scheduler.trials.is_unsure


# --- grammars ---------------------------------------------------------------------------------


def test_a_suspected_grammar_waits_for_those_under_way() -> None:
    driver = with_grammars("h")
    driver.add(make_request("a", PROMPT, 3, grammar="g"))
    driver.add(make_request("b", PROMPT, 3, grammar="h"))
    assert asked_grammars(driver) == ["g"]
    driver.prepare()
    assert asked_grammars(driver) == [], "there is a step to compute"
    assert driver.scheduler.is_on_trial
    driver.execute()
    driver.process()
    assert asked_grammars(driver) == ["h"]
    driver.run()
    assert {name for name, _ in driver.finished} == {"a", "b"}


def test_no_grammar_is_asked_for_beside_a_suspected_one() -> None:
    driver = with_grammars("h")
    for name, text in (("a", "h"), ("b", "g"), ("c", "i")):
        driver.add(make_request(name, PROMPT, 3, grammar=text))
    assert asked_grammars(driver) == ["h"]
    driver.prepare()
    assert asked_grammars(driver) == ["g", "i"]
    driver.run()
    assert {name for name, _ in driver.finished} == {"a", "b", "c"}


def test_a_suspected_grammar_that_nobody_wants_any_more_holds_up_nothing() -> None:
    driver = with_grammars("h")
    driver.add(make_request("a", PROMPT, 3, grammar="h"))
    driver.add(make_request("b", PROMPT, 3, grammar="g"))
    assert asked_grammars(driver) == ["h"]
    driver.abort("a")
    assert not driver.scheduler.is_on_trial
    driver.run()
    assert ("b", 0) in driver.finished


def test_a_grammar_that_was_made_alone_is_cleared() -> None:
    driver = with_grammars("h")
    driver.add(make_request("a", PROMPT, 3, grammar="h"))
    driver.run()
    assert not driver.scheduler.trials.is_suspected("h")


# --- other engines ----------------------------------------------------------------------------


def test_grammars_are_named_to_other_engines_and_tried_there() -> None:
    """A second death, on another engine, is enough."""
    poison, other = make_request("a", PROMPT, 3, grammar="h"), make_request("b", PROMPT, 3)
    first = Driver()
    first.add(poison)
    assert asked_grammars(first) == ["h"]
    first.reset_worker()
    first.add(other)
    scheduler = first.scheduler
    named = suspect_ids(scheduler.suspects, scheduler.requests.values(), scheduler.trials, scheduler.parts)
    assert named == ("a",)
    second = Driver()
    second.add(replace(poison, num_deaths=1))
    second.add(other)
    assert asked_grammars(second) == [], "first comes the step that was planned with it"
    second.execute()
    second.process()
    assert asked_grammars(second) == ["h"]
    second.reset_worker()
    assert second.finished["a", 0].error_code == "ends_workers"
    second.run()
    assert len(second.outputs["b", 0]) == 3


def test_only_what_was_made_alone_is_guilty() -> None:
    trials = Trials()
    order = PrepareGrammar(1, "g", 0)
    assert trials.blame(["g"]) is None
    trials.begin("g", order)
    assert trials.blame(["g"]) is None, "the worker was not told yet"
    assert trials.take_order() is order
    assert trials.take_order() is None
    assert trials.blame(["h"]) is None
    assert trials.blame(["g"]) == "g"
    assert not trials.is_suspected("g")
    assert trials.is_suspected("h")


def test_who_is_guilty_may_have_been_forgotten() -> None:
    """Engines that lost workers may name any number of suspects while one is made."""
    trials = Trials()
    trials.suspect("g")
    trials.begin("g", PrepareGrammar(1, "g", 0))
    trials.take_order()
    for number in range(2000):
        trials.suspect(f"{number}")
    assert not trials.is_suspected("g")
    assert trials.blame(["g"]) == "g"


# --- beside others ----------------------------------------------------------------------------


def deaths_over(driver: Driver, kills: bytes | str) -> int:
    """Run to the end, with a worker that makes at once what it is told, and dies of this; return the deaths."""
    for num_deaths in range(12):
        while not is_made_first(driver, kills):
            if driver.schedule() is None and not driver.worker.to_encode and not driver.worker.asked:
                if not driver.step():
                    return num_deaths
            elif not is_made_first(driver, kills):
                driver.prepare()
        driver.reset_worker()
    raise AssertionError("it is never found")


def is_made_first(driver: Driver, key: bytes | str) -> bool:
    worker = driver.worker
    return bool(
        (worker.to_encode and worker.to_encode[0].key == key) or (worker.asked and worker.asked[0].grammar == key)
    )


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize("kind", ["grammar", "image"])
def test_neighbours_are_never_blamed_for_a_suspect(kind: str, pipeline_depth: int) -> None:
    """They come after it in the queue, or run already when its turn comes, and always have something to compute."""
    driver = Driver(make_limits(max_embedding_bytes=1000), pipeline_depth=pipeline_depth)
    driver.add(make_request("before", PROMPT[::-1], 40))
    driver.schedule()
    if kind == "grammar":
        driver.add(make_request("kills", PROMPT, 3, grammar="h"))
    else:
        driver.add(shows("kills", PROMPT, CAT, DOG))
    driver.add(make_request("after", range(3, 9), 40))
    assert deaths_over(driver, "h" if kind == "grammar" else DOG.key) == 2
    assert driver.finished["kills", 0].error_code == "ends_workers"
    for name, prompt in (("before", PROMPT[::-1]), ("after", list(range(3, 9)))):
        request = driver.added[name][0]
        assert driver.outputs[name, 0] == solo_run(prompt, request.sampling, 0, driver.limits)


def test_a_grammar_is_not_blamed_for_an_image_nor_an_image_for_a_grammar() -> None:
    """One suspect at a time, and what it is made beside of another kind is done before."""
    driver = with_images(DOG.key, "h")
    driver.add(shows("a", PROMPT, CAT))
    assert asked_images(driver) == [CAT.key]
    driver.add(make_request("b", PROMPT, 3, grammar="h"))
    driver.add(shows("c", PROMPT, DOG))
    assert asked_grammars(driver) == [], "an image is being embedded"
    assert driver.scheduler.is_on_trial
    driver.prepare()
    assert (asked_grammars(driver), asked_images(driver)) == (["h"], [])
    driver.prepare()
    assert (asked_grammars(driver), asked_images(driver)) == ([], []), "now there is a step to compute"
    driver.run()
    assert {name for name, _ in driver.finished} == {"a", "b", "c"}
    assert driver.num_deaths == 0


def test_a_step_is_not_blamed_for_an_image_that_is_made_beside_it() -> None:
    """Not even the step of a request that was in flight when another engine's worker died of another image."""
    driver = Driver(make_limits(max_embedding_bytes=1000), pipeline_depth=0)
    driver.add(replace(make_request("innocent", PROMPT[::-1], 9), num_deaths=1))
    driver.schedule()
    driver.add(shows("kills", PROMPT, DOG))
    assert deaths_over(driver, DOG.key) == 2
    assert driver.finished["kills", 0].error_code == "ends_workers"
    request = driver.added["innocent"][0]
    assert driver.outputs["innocent", 0] == solo_run(PROMPT[::-1], request.sampling, 0, driver.limits)


def test_a_suspected_grammar_waits_for_one_that_nobody_wants_any_more() -> None:
    """The worker is preparing it nevertheless, and may die of it."""
    driver = with_grammars("h")
    driver.add(make_request("a", PROMPT, 3, grammar="g"))
    assert asked_grammars(driver) == ["g"]
    driver.abort("a")
    driver.add(make_request("b", PROMPT, 3, grammar="h"))
    assert asked_grammars(driver) == ["g"]
    driver.prepare()
    assert asked_grammars(driver) == ["h"]
    driver.run()
    assert ("b", 0) in driver.finished


@pytest.mark.parametrize("is_over", [False, True])
def test_a_death_over_an_image_that_was_dropped_is_not_the_next_one_s_fault(*, is_over: bool) -> None:
    """The worker may be at it when the suspect's turn comes. When it has embedded a later one, it is past it."""
    driver = with_images(DOG.key)
    driver.add(shows("a", PROMPT, CAT))
    assert asked_images(driver) == [CAT.key]
    driver.abort("a")
    if is_over:
        driver.add(shows("later", PROMPT, COW, max_tokens=1))
        assert asked_images(driver) == [COW.key]
        driver.run()
    driver.add(shows("b", PROMPT, DOG))
    assert asked_images(driver) == [DOG.key]
    driver.reset_worker()
    assert (("b", 0) in driver.finished) == is_over
    if not is_over:
        assert asked_images(driver) == [DOG.key]
        driver.reset_worker()
    assert driver.finished["b", 0].error_code == "ends_workers"


def test_a_suspected_grammar_does_not_wait_for_one_that_cannot_be_used() -> None:
    driver = with_grammars("h")
    driver.add(make_request("a", PROMPT, 3, grammar="bad"))
    driver.add(make_request("b", PROMPT, 3, grammar="h"))
    assert asked_grammars(driver) == ["bad"]
    driver.prepare()
    assert driver.finished["a", 0].error
    assert asked_grammars(driver) == ["h"]
    driver.run()
    assert ("b", 0) in driver.finished


def test_a_grammar_held_for_an_image_on_trial_comes_after_it() -> None:
    driver = with_images(DOG.key)
    driver.add(shows("a", PROMPT, DOG))
    driver.add(make_request("b", PROMPT, 3, grammar="g"))
    assert (asked_images(driver), asked_grammars(driver)) == ([DOG.key], [])
    driver.prepare()
    assert asked_grammars(driver) == ["g"]
    driver.run()
    assert {name for name, _ in driver.finished} == {"a", "b"}
