"""The process that renders chat templates and tokenizes long texts:
`python -m penstock.frontend.text.child MODEL TEMPLATE SPECIAL [TEXTS] PARENT`, with the folder of an adapter's TEXTS.

A checkpoint's template is a program, and a tokenizer's time need not be linear in its text: see `child_pool.py`.
["render", conversation, max_chars] is answered with [[text, seam, warnings], error] (null: it is too long),
["look", null, null] with [what the template shows, error] (see `template_facts.py`), ["encode", [text, seam],
add_special_tokens] with [token ids, error], ["pair", [text, text, most, most of the second], null] with [[token
ids, where the second text begins], error], and ["plain", texts, null] with [token ids of each, error], where special
tokens in the texts are plain text whatever SPECIAL is. SPECIAL is "tokens" if a client's text may spell special tokens,
else "text". The tokenizer is read before the process is ready: it may take seconds.

What a client writes is plain text: a special token spelled out in it must not end a turn, or begin one of another role.
But one rendering yields both the template's own special tokens and the client's text. So wherever a client's text
spells a special token, a character found nowhere else (the seam) is put into it before the template is rendered. The
rendered text is tokenized as a whole, as always, and the seam's tokens are dropped (`tokenizer.py`). All other text
gets the same tokens as without seams. Nearly all conversations spell no special token, and are left as they are.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import ConfigError
from penstock.frontend.errors import ContextLengthExceeded, TemplateFailed
from penstock.frontend.text.chat_template import Rendered, ValidConversation, load_chat_template
from penstock.frontend.text.child_pool import answer, limit_resources
from penstock.frontend.text.template_facts import facts_of
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer, special_texts_of, special_tokens_of
from penstock.ipc import process
from penstock.models.files.texts import WithTexts
from penstock.models.finding.registry import open_checkpoint

_SEAMS = ("\U0010fffd", "\U0010fffc", "\U0010fffb", "\U000ffffd", "\U000ffffc", "\uf8ff")
"""Characters for private use: no tokenizer has learned to join them with others."""


class SpecialTexts:
    """The texts of a tokenizer's special tokens; finds them in what clients write."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._pattern = re.compile(_one_of({text for text in texts if len(text.strip()) > 1}) or r"(?!)", re.DOTALL)

    def stand_in(self, value: Any) -> bool:
        """Whether a text in this JSON value, a key included, spells a special token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, dict):
            return any(self.stand_in(key) or self.stand_in(item) for key, item in value.items())
        return isinstance(value, list) and any(map(self.stand_in, value))

    def broken(self, value: Any, seam: str) -> Any:
        """The value with a seam in each special token that it spells."""
        if isinstance(value, str):
            while self._pattern.search(value):  # the rest of one special token may contain another
                value = self._pattern.sub(lambda found: found[0][0] + seam + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.broken(key, seam): self.broken(item, seam) for key, item in value.items()}
        return [self.broken(item, seam) for item in value] if isinstance(value, list) else value


def encode_plain(tokenizer: TextTokenizer, texts: list[str], special: SpecialTexts) -> list[list[int]]:
    """The token ids of each text; special tokens spelled out in it are read as plain text.

    Raises:
        TemplateFailed: if the texts hold all characters that could part a special token.
    """
    seam = seam_for(texts) if special.stand_in(texts) else ""
    if seam:
        texts = [special.broken(text, seam) for text in texts]
    return [tokenizer.encode(text, add_special_tokens=False, seam=seam) for text in texts]


def _one_of(texts: set[str]) -> str:
    """A pattern of the longest of these texts at a place, as a tree of their letters.

    One alternative for each text would be tried one after the other, at each place where one might begin.
    """
    rest: dict[str, set[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], set()).add(text[1:])
    if not rest:
        return ""
    branches = [re.escape(first) + _one_of(ends) for first, ends in sorted(rest.items())]
    together = branches[0] if len(branches) == 1 and "" not in texts else f"(?:{'|'.join(branches)})"
    return f"{together}?" if "" in texts else together


def render_plain(
    render: Callable[[ValidConversation], Rendered], conversation: ValidConversation, special: SpecialTexts
) -> tuple[Rendered, str]:
    """The rendered conversation, and the seam in its text; an empty seam if the client spells no special token.

    A final message that is to be continued is the model's own text, and stays as it is. So do other messages of the
    assistant if the template looks for the special tokens that they spell.

    Raises:
        TemplateFailed: as `render`, or if something is nested too deeply.
    """
    try:
        if not special.stand_in([conversation.messages, conversation.tools, conversation.variables]):
            return render(conversation), ""
        seam = seam_for([conversation.messages, conversation.tools, conversation.variables])
        as_it_is = render(conversation)
        text = _clean(render(_seamed(conversation, special, seam)).text, seam)
        if text.replace(seam, "") != as_it_is.text:
            text = _clean(render(_seamed(conversation, special, seam, role_as_it_is="assistant")).text, seam)
        return replace(as_it_is, text=text), seam
    except RecursionError:
        raise TemplateFailed("the messages are nested too deeply", param="messages") from None


def _seamed(
    conversation: ValidConversation, special: SpecialTexts, seam: str, *, role_as_it_is: str = ""
) -> ValidConversation:
    last = len(conversation.messages) - 1 if conversation.continue_final_message else -1
    messages = [
        message
        if index == last or message["role"] == role_as_it_is
        else {field: special.broken(value, seam) for field, value in message.items()}
        for index, message in enumerate(conversation.messages)
    ]
    return replace(
        conversation,
        messages=messages,
        tools=special.broken(conversation.tools, seam),
        variables=special.broken(conversation.variables, seam),
    )


def seam_for(written: list[Any]) -> str:
    """A seam that does not occur in what a client has written.

    Raises:
        TemplateFailed: if all seams occur in it.
    """
    everything = repr(written)
    for seam in _SEAMS:
        if repr(seam)[1:-1] not in everything and seam not in everything:
            return seam
    raise TemplateFailed("the messages contain text that looks like special tokens and cannot be escaped")


def _clean(text: str, seam: str) -> str:
    """Replace the JSON escape of the seam, which a template may have written, by the seam itself."""
    escape = seam.encode("utf-16-be").hex()
    units = "".join(f"\\u{escape[i : i + 4]}" for i in range(0, len(escape), 4))
    return text.replace(units, seam)


def main(argv: list[str]) -> int:
    """Answer until stdin ends; the exit code."""
    path, template_file, special, *texts, parent = argv
    process.end_with_parent(int(parent))
    process.begin("penstock-text", "warning")
    limit_resources()
    try:
        checkpoint = open_checkpoint(Path(path))
        if texts:
            checkpoint = WithTexts(checkpoint, Path(texts[0]))
        template = load_chat_template(checkpoint, template_file, special_tokens_of(checkpoint))
        spelled = SpecialTexts(special_texts_of(checkpoint) if special == "text" else ())
        tokenizer = load_tokenizer(checkpoint)
        plain: SpecialTexts | None = None  # most processes are never asked for such texts
    except ConfigError as error:
        answer(["", str(error)])
        return process.EXIT_CONFIG
    answer([])
    for line in sys.stdin.buffer:
        kind, what, how = msgspec.json.decode(line)
        try:
            if kind == "encode":
                text, seam = what
                answer([tokenizer.encode(text, add_special_tokens=how, seam=seam), ""])
            elif kind == "pair":
                first, second, most, most_of_second = what
                answer([tokenizer.encode_pair(first, second, most=most, most_of_second=most_of_second), ""])
            elif kind == "plain":
                plain = plain or SpecialTexts(tokenizer.special_texts)
                answer([encode_plain(tokenizer, what, plain), ""])
            elif template is None:
                answer(["", "there is no chat template"])
            elif kind == "look":
                answer([facts_of(template), ""])
            else:
                conversation = msgspec.convert(what, ValidConversation)
                render = partial(template.render_conversation, max_chars=how)
                rendered, seam = render_plain(render, conversation, spelled)
                answer([[rendered.text, seam, rendered.warnings], ""])
        except ContextLengthExceeded:
            answer([None, ""])
        except TemplateFailed as error:
            answer(["", error.message])
        except MemoryError:
            answer(["", "it takes too much memory"])
        except Exception as error:  # the process is for all clients: what one has sent must not end it
            answer(["", f"it fails: {type(error).__name__}: {error}"[:300]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
