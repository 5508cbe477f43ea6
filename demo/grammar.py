"""Short stories and rhymes from a small grammar; the hero that the question names is the hero of the story."""

import random
import tomllib
from pathlib import Path

HEROES = (
    "fox", "cat", "dog", "mouse", "owl", "rabbit", "bear", "wolf", "turtle", "frog", "duck", "hedgehog", "robot",
    "girl", "boy", "knight", "sailor", "farmer", "baker", "king", "queen", "dragon", "wizard", "giant", "token",
    "scheduler", "llama", "horse", "bird", "snail",
)  # fmt: skip
_NAMES = ("Mira", "Tom", "Lena", "Otto", "Nora", "Finn", "Ida", "Paul", "Ruby", "Max")
_TRAITS = ("little", "brave", "curious", "old", "shy", "clever", "lazy", "cheerful", "tired", "hungry")
_PLACES = (
    "at the edge of a quiet forest", "beside a wide river", "in a small village", "on a green hill",
    "near an old mill", "in a town by the sea", "under a tall oak", "at the foot of a mountain",
)  # fmt: skip
_TROUBLES = (
    ("a storm broke the only bridge", "build a new bridge", "the new bridge stood firm and everyone crossed it"),
    ("the well ran dry", "find water", "clear water came up from the ground again"),
    ("the lantern of the lighthouse went out", "light it again", "the light shone over the waves once more"),
    ("a long winter covered the path with snow", "clear the path", "the path was open and the sun came back"),
    ("a key fell into the pond", "get the key back", "the key lay dry and shining on the grass"),
    ("the bell of the tower fell silent", "make it ring", "the bell rang louder than ever before"),
    ("the water wheel stopped turning", "open the gate of the pipe", "the water rushed in and the wheel turned again"),
    ("a great stone rolled onto the road", "move the stone", "the road was free and the carts rolled on"),
)
_HELPERS = (
    "a patient snail", "a wise old crow", "two friendly beavers", "a passing tinker", "a small grey donkey",
    "a swarm of bees", "a kind miller", "three young otters",
)  # fmt: skip
_METHODS = (
    "They worked step by step, one piece after another.",
    "They made a plan, shared the work, and did not stop until dark.",
    "They split the big task into small ones, and soon half of it was done.",
    "They tried twice and failed, but the third time it worked.",
)
_MORALS = (
    "Big things are done in small steps.", "Nobody has to do it alone.", "Those who share their work finish early.",
    "Patience opens every gate.", "A good plan is half the work.",
)  # fmt: skip
_STORY_PLAIN = (
    "Tell me a story.", "Tell me a short story.", "I want to hear a story.", "Can you tell a story?",
    "A story, please.", "Write a short story.", "Do you know a story?", "Make up a story.",
)  # fmt: skip
_STORY_ABOUT = (
    "Tell me a story about a {h}.", "Tell me a short story about a {h}.", "Write a story about a {h}.",
    "I want to hear a story about a {h}.", "Can you tell a story about a {h}?", "A story about a {h}, please.",
    "Make up a story about a {h}.", "Do you know a story about a {h}?", "Once upon a time there was a {h}...",
)  # fmt: skip

RHYMES: dict[str, str] = tomllib.loads((Path(__file__).parent / "words" / "rhymes.toml").read_text("utf-8"))
_RHYME_PLAIN = (
    "Tell me a rhyme.", "Write a poem.", "Tell me a poem.", "A short rhyme, please.", "Can you rhyme?",
    "Write a short poem.", "Do you know a poem?", "Make a rhyme.", "A poem, please.",
)  # fmt: skip
_RHYME_ABOUT = (
    "Write a rhyme about the {r}.", "Tell me a rhyme about a {r}.", "Write a poem about the {r}.",
    "A poem about a {r}, please.", "Write a short poem about a {r}.", "Can you rhyme about the {r}?",
    "I want a rhyme about the {r}.", "Make a poem about the {r}.", "Do you know a poem about the {r}?",
)  # fmt: skip


def story(hero: str, rng: random.Random) -> str:
    """A story of six sentences about a hero."""
    name, trait, other = rng.choice(_NAMES), rng.choice(_TRAITS), rng.choice(_HELPERS)
    trouble, task, ending = rng.choice(_TROUBLES)
    article = "an" if trait[0] in "aeiou" else "a"
    return (
        f"Once upon a time {article} {trait} {hero} named {name} lived {rng.choice(_PLACES)}. One day {trouble}. "
        f"Everyone was worried, but the {hero} said: I will {task}. "
        f"On the way {name} met {other}, who offered to help. {rng.choice(_METHODS)} "
        f"In the end {ending}, and they all had soup together. {rng.choice(_MORALS)}"
    )


def story_turn(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story."""
    hero = rng.choice(HEROES)
    if rng.random() < 0.3:
        return rng.choice(_STORY_PLAIN), story(hero, rng)
    return rng.choice(_STORY_ABOUT[1:]).format(h=hero), story(hero, rng)


def rhyme_turn(rng: random.Random) -> tuple[str, str]:
    """A request for a rhyme, and the rhyme."""
    subject = rng.choice(tuple(RHYMES))
    if rng.random() < 0.3:
        return rng.choice(_RHYME_PLAIN), RHYMES[subject]
    return rng.choice(_RHYME_ABOUT[1:]).format(r=subject), RHYMES[subject]


def held_out_requests() -> tuple[tuple[str, str], ...]:
    """(request in a wording that training never uses, words that the answer must contain)."""
    stories = [(_STORY_ABOUT[0].format(h=hero), f" {hero} named ") for hero in HEROES]
    rhymes = [(_RHYME_ABOUT[0].format(r=subject), RHYMES[subject].splitlines()[0].lower()) for subject in RHYMES]
    return (*stories, *rhymes)
