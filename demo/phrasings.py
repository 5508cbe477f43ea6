"""Ways to ask: question templates by kind, and the small noise of how people type.

`{s}` is the thing asked about; `{is}`, `{does}` and `{works}` agree with its number.
"""

import random
import re
from collections.abc import Iterator

TEMPLATES: dict[str, tuple[str, ...]] = {
    "what": (
        "What {is} {s}?",
        "What exactly {is} {s}?",
        "What {does} {s} mean?",
        "What is meant by {s}?",
        "Explain {s}.",
        "Can you explain {s}?",
        "Explain {s} to a beginner.",
        "Define {s}.",
        "Tell me about {s}.",
        "Tell me something about {s}.",
        "What do you know about {s}?",
        "Describe {s}.",
        "Give me a short explanation of {s}.",
        "I would like to understand {s}.",
        "I have never heard of {s}. What is it?",
        "What should I know about {s}?",
        "{s}?",
        "{s}: what is that?",
        "{s}, please.",
        "{s}, explain it.",
        "{s} - what does it mean?",
        "What about {s}?",
        "In a few words, what {is} {s}?",
        "Do you know what {s} {is}?",
    ),
    "why": (
        "Why {is} {s} needed?",
        "Why do we need {s}?",
        "Why {is} {s} useful?",
        "Why {is} {s} important?",
        "Why {does} {s} matter?",
        "What {is} {s} good for?",
        "What is the point of {s}?",
        "What problem {does} {s} solve?",
        "What are the benefits of {s}?",
        "What are the advantages of {s}?",
        "What {is} {s} used for?",
        "Why should I care about {s}?",
        "What is the purpose of {s}?",
        "Why would anyone use {s}?",
    ),
    "how": (
        "How {does} {s} work?",
        "Explain how {s} {works}.",
        "How {is} {s} implemented?",
        "What happens inside {s}?",
        "Walk me through {s}.",
        "Describe how {s} {works}.",
        "How {does} {s} work in detail?",
        "What is the mechanism behind {s}?",
        "How is it done: {s}?",
        "Can you tell me how {s} {works}?",
        "What {does} {s} do step by step?",
        "How {does} {s} function?",
    ),
    "downside": (
        "What are the downsides of {s}?",
        "What are the drawbacks of {s}?",
        "What are the disadvantages of {s}?",
        "What {does} {s} cost?",
        "What is bad about {s}?",
        "What are the limits of {s}?",
        "What is the price of {s}?",
        "What is the problem with {s}?",
        "When {does} {s} not help?",
        "Which weaknesses {does} {s} have?",
        "Is there a catch with {s}?",
        "What is the catch with {s}?",
    ),
    "howto": (
        "How do I {s}?",
        "How can I {s}?",
        "How to {s}?",
        "What is the way to {s}?",
        "Show me how to {s}.",
        "I want to {s}.",
        "I want to {s}. What do I do?",
        "I need to {s}.",
        "Is there a way to {s}?",
        "Help me {s}.",
        "What do I have to do to {s}?",
        "Can I {s}?",
        "Tell me how to {s}.",
        "What is needed to {s}?",
        "How would one {s}?",
    ),
    "flag": (
        "What does {s} do?",
        "What is {s}?",
        "What is {s} for?",
        "What does the flag {s} mean?",
        "What is the {s} flag for?",
        "Explain {s}.",
        "Explain the option {s}.",
        "Tell me about {s}.",
        "{s}?",
        "What is the default of {s}?",
        "When should I use {s}?",
        "What does the option {s} do?",
        "How do I use {s}?",
        "What is the meaning of {s}?",
        "What can I set with {s}?",
        "Describe the flag {s}.",
    ),
    "endpoint": (
        "What does {s} do?",
        "What is {s}?",
        "What is {s} for?",
        "What is the endpoint {s} for?",
        "What does the {s} endpoint do?",
        "Explain {s}.",
        "Tell me about {s}.",
        "{s}?",
        "What does {s} return?",
        "When should I use {s}?",
        "How do I use {s}?",
        "What happens when I call {s}?",
        "Describe the endpoint {s}.",
        "What can I do with {s}?",
    ),
    "compare": (
        "What is the difference between {a} and {b}?",
        "How do {a} and {b} differ?",
        "Compare {a} and {b}.",
        "{a} vs {b}?",
        "{a} or {b}: what is the difference?",
        "How is {a} different from {b}?",
        "What distinguishes {a} from {b}?",
        "Explain the difference between {a} and {b}.",
        "Are {a} and {b} the same?",
        "Is {a} the same as {b}?",
        "{a} versus {b}",
        "Tell me how {a} differs from {b}.",
    ),
    "support": (
        "Does Penstock support {s}?",
        "Does it support {s}?",
        "Do you support {s}?",
        "{Is} {s} supported?",
        "Can I use {s} with Penstock?",
        "Can I use {s} here?",
        "Can I use {s}?",
        "Can Penstock use {s}?",
        "Can it use {s}?",
        "Can Penstock handle {s}?",
        "Can I run {s}?",
        "Can it run {s}?",
        "Does Penstock work with {s}?",
        "Does it work with {s}?",
        "Will {s} work?",
        "{Does} {s} work?",
        "{Does} {s} work with this?",
        "Is there support for {s}?",
        "How do I use {s}?",
        "I would like to use {s}.",
        "I want to use {s}.",
        "I have {s}. Does that work?",
        "I need {s}.",
        "{s} support?",
        "{Is} {s} possible?",
        "What if I want {s}?",
        "Do you have {s}?",
        "{s} with Penstock?",
    ),
    "size": (
        "How many GPUs does {s} need?",
        "How many GPUs do I need for {s}?",
        "How many GPUs for {s}?",
        "How many H100s do I need for {s}?",
        "How many cards do I need for {s}?",
        "How much memory does {s} need?",
        "How much memory do I need for {s}?",
        "How much VRAM does {s} need?",
        "How much VRAM do I need for {s}?",
        "How much VRAM for {s}?",
        "How much RAM does {s} take?",
        "How much GPU memory does {s} use?",
        "What GPU do I need for {s}?",
        "What GPU do I need to run {s}?",
        "Which GPU can run {s}?",
        "Which card is good for {s}?",
        "What hardware does {s} need?",
        "What do I need to run {s}?",
        "What does it take to serve {s}?",
        "Can I run {s} on one GPU?",
        "Can I run {s} on a single card?",
        "Can I run {s} on an A100?",
        "Can I run {s} on my GPU?",
        "Can I run {s} on an RTX 4090?",
        "Does {s} fit on one GPU?",
        "Does {s} fit on an 80 GB card?",
        "Does {s} fit into 24 GB?",
        "Does {s} fit in 16 GB of VRAM?",
        "Will {s} fit on my card?",
        "Will {s} fit on a 48 GB card?",
        "Will {s} fit on an L40S?",
        "Does {s} fit on a single 40 GB GPU?",
        "Can one A100 run {s}?",
        "Can two H100s run {s}?",
        "Can I run {s} with 64 GB of memory?",
        "Can I run {s} on a single H200?",
        "Can I serve {s} on one 16 GB card?",
        "Can I host {s} at home?",
        "Are two cards enough for {s}?",
        "Will {s} run on my machine?",
        "Is one H100 enough for {s}?",
        "Is 48 GB enough for {s}?",
        "Is an RTX 3090 enough for {s}?",
        "How big is {s}?",
        "How large is {s}?",
        "How many gigabytes is {s}?",
        "Hardware requirements for {s}?",
        "{s} memory requirements",
        "{s} GPU?",
        "I want to run {s}. What do I need?",
        "I would like to serve {s}. Which hardware?",
        "How do I fit {s} on one GPU?",
        "How heavy is {s}?",
    ),
    "more": (
        "Tell me more.",
        "More, please.",
        "Go on.",
        "And what else?",
        "Can you tell me more about that?",
        "Please continue.",
        "More details?",
        "I want to know more.",
        "What else should I know about it?",
        "Anything else?",
    ),
}

_OPENERS = (
    "Please, {}", "Hi, {}", "Hello! {}", "Hey, {}", "So, {}", "Okay, {}", "One question: {}", "Quick question: {}",
    "I wonder: {}", "Tell me, {}", "Sorry, {}", "Now, {}", "Well, {}", "And {}", "But {}", "Good. {}", "Hmm, {}",
)  # fmt: skip
_CLOSERS = (
    "{} Thanks!", "{} Please.", "{} Thank you.", "{} I am new to this.", "{} Keep it short.", "{} I am curious.",
    "{} In simple words.", "{} Just asking.",
)  # fmt: skip
_PLURAL = re.compile(r"(?<![suix])s$|supports$")
_SINGULAR_WORDS = frozenset({"transformers", "checkpoints", "transformer's", "requests"})


def is_plural(name: str) -> bool:
    """Whether a name takes "are" and "do"; by its last word, which is enough for the names used here."""
    last = name.split()[-1]
    return bool(_PLURAL.search(last)) and last not in _SINGULAR_WORDS


def fill(template: str, name: str) -> str:
    """A question template with the thing asked about, agreeing in number, starting with a capital."""
    plural = is_plural(name)
    words = {"is": "are", "does": "do", "works": "work"} if plural else {"is": "is", "does": "does", "works": "works"}
    first = {word.capitalize(): agreeing.capitalize() for word, agreeing in words.items()}
    return capitalized(template.format(s=name, **words, **first))


def capitalized(text: str) -> str:
    """The text with its first letter in upper case; flags and paths stay as they are."""
    return text[:1].upper() + text[1:]


def normalized(text: str) -> str:
    """What two ways of typing the same question have in common: lower-case words and digits."""
    return " ".join(re.findall(r"[a-z0-9+*/_.-]*[a-z0-9]|[+*/-]", text.lower()))


def noisy(text: str, rng: random.Random) -> str:
    """The question as somebody in a hurry might type it: other case, no punctuation, a greeting, a slip."""
    if rng.random() < 0.12:
        opener = rng.choice(_OPENERS)
        text = opener.format(text if opener[-3] == " " and opener[-4] in "!." else _uncapitalized(text))
    if rng.random() < 0.08 and text[-1:] in ".?!":
        text = rng.choice(_CLOSERS).format(text)
    if rng.random() < 0.35:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip("?.!")
    elif rng.random() < 0.05:
        text += rng.choice(("!", "?", " ?", "...", "??"))
    if rng.random() < 0.1 and len(text) > 12:
        text = "".join(_slip(text, rng))
    return text


def _uncapitalized(text: str) -> str:
    first = text.split(maxsplit=1)[0]
    return text if first.isupper() or any(letter.isupper() for letter in first[1:]) else text[:1].lower() + text[1:]


def _slip(text: str, rng: random.Random) -> Iterator[str]:
    """Swap, drop or double one letter inside a word; digits and flags are left alone."""
    spots = [i for i in range(1, len(text) - 2) if text[i].isalpha() and text[i + 1].isalpha() and text[i - 1] != "-"]
    if not spots:
        yield text
        return
    spot = rng.choice(spots)
    kind = rng.randrange(3)
    yield text[:spot]
    if kind == 0:
        yield text[spot + 1] + text[spot]
    elif kind == 1:
        yield text[spot + 1]
    else:
        yield text[spot] * 2 + text[spot + 1]
    yield text[spot + 2 :]
