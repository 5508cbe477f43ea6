"""The process that renders chat templates and tokenizes long texts:
`python -m penstock.frontend.text.child MODEL TEMPLATE SPECIAL PARENT`.

A checkpoint's template is a program, and a tokenizer's time need not be linear in its text: see `child_pool.py`.
["render", conversation, max_chars] is answered with [[text, seam], error] (no text: it is too long),
["encode", [text, seam], add_special_tokens] with [token ids, error]; on seams see `plain_text.py`. SPECIAL is "tokens"
if a client's text may spell special tokens, else "text". The tokenizer is read when the first long text comes.
"""

import sys
from functools import partial
from pathlib import Path

import msgspec

from penstock.core.checkpoint.registry import open_checkpoint
from penstock.core.config import ConfigError
from penstock.frontend.errors import ContextLengthExceeded, TemplateFailed
from penstock.frontend.text.chat_template import ChatTemplate, ValidConversation, load_chat_template
from penstock.frontend.text.child_pool import answer, limit_resources
from penstock.frontend.text.plain_text import SpecialTexts, render_plain
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer, special_texts_of, special_tokens_of
from penstock.ipc import process


def main(argv: list[str]) -> int:
    """Answer until stdin ends; the exit code."""
    path, template_file, special, parent = argv
    process.end_with_parent(int(parent))
    process.begin("penstock-text", "warning")
    limit_resources()
    try:
        checkpoint = open_checkpoint(Path(path))
        template = load_chat_template(checkpoint, template_file, special_tokens_of(checkpoint))
        special_texts = SpecialTexts(special_texts_of(checkpoint) if special == "text" else ())
    except ConfigError as error:
        answer(["", str(error)])
        return process.EXIT_CONFIG
    answer([])
    tokenizer: TextTokenizer | None = None
    for line in sys.stdin.buffer:
        kind, what, how = msgspec.json.decode(line)
        try:
            if kind == "encode":
                tokenizer = tokenizer or load_tokenizer(checkpoint)
                text, seam = what
                answer([tokenizer.encode(text, add_special_tokens=how, seam=seam), ""])
            elif template is not None:
                conversation = msgspec.convert(what, ValidConversation)
                answer([render_plain(partial(render, template, max_chars=how), conversation, special_texts), ""])
            else:
                answer(["", "there is no chat template"])
        except ContextLengthExceeded:
            answer([None, ""])
        except TemplateFailed as error:
            answer(["", error.message])
        except MemoryError:
            answer(["", "it takes too much memory"])
    return 0


def render(template: ChatTemplate, conversation: ValidConversation, *, max_chars: int) -> str:
    """A conversation's prompt.

    Raises:
        TemplateFailed: the template refuses it, or fails on it.
        ContextLengthExceeded: it writes more than `max_chars`.
    """
    return template.render(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=conversation.variables,
        tools=conversation.tools,
        max_chars=max_chars,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
