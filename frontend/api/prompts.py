"""From prompts to token ids, off the event loop: renders chat templates and tokenizes.

A chat template is always rendered in a process that can be killed: it is a program, and only running it shows
whether it ends. That costs about 0.2 milliseconds more than a thread would.
Short texts are tokenized in a thread, which takes a bounded time (any tokenizer reads 64 KiB in well under a
second); longer ones in the process too.
"""

from pathlib import Path

import structlog

from penstock.frontend.errors import ContextLengthExceeded, InvalidParameter, InvalidRequest, TemplateFailed
from penstock.frontend.text.chat_template import ValidConversation
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError, ChildUnusableError
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import MAX_BYTES_PER_TOKEN, Rules, check_text_size
from penstock.frontend.validation.completion import ValidCompletion

log = structlog.get_logger()

MAX_RENDER_SECONDS = 5.0
MAX_ENCODE_SECONDS = 10.0

SHORT_TEXT = 64 << 10
"""The longest text that is tokenized in a thread, in characters."""

_MAX_PROCESSES = 2
_MAX_QUEUED = 8192  # the largest possible number of connections
_MAX_ANSWER_BYTES = 256 << 20


class PromptReader:
    """Makes prompts for one model; lives in a running event loop until `close`."""

    def __init__(
        self, model: Path, template_file: str, tokenizer: TextTokenizer, *, parse_special_tokens: bool = False
    ) -> None:
        """`model` is the checkpoint's path; `template_file` and `parse_special_tokens` are options."""
        self._tokenizer = tokenizer
        self._children = ChildPool(
            "penstock.frontend.text.child",
            (str(model), template_file, "tokens" if parse_special_tokens else "text"),
            max_processes=_MAX_PROCESSES,
            max_queued=_MAX_QUEUED,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    async def warm(self) -> None:
        """Start a process before the first request arrives."""
        await self._children.warm()

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()

    async def render_and_encode(
        self, conversation: ValidConversation, rules: Rules, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Render and tokenize a conversation. Templates write their own special tokens, so none are added by default.

        Raises:
            TemplateFailed: if the template refuses the messages, or does not end.
            ContextLengthExceeded: if the text cannot fit, whatever its tokens.
        """
        text, seam = await self._render(conversation, rules)
        check_text_size("messages", text, rules)
        [token_ids] = await self.encode_all([text], field="messages", add_special_tokens=add_special_tokens, seam=seam)
        if not token_ids:
            raise InvalidRequest("the chat template turns these messages into an empty prompt", param="messages")
        return token_ids

    async def encode_prompts(self, completion: ValidCompletion) -> list[list[int]]:
        """The token ids of each prompt.

        Raises:
            InvalidParameter: if a prompt has no tokens, or takes too long.
        """
        texts = [prompt for prompt in completion.prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in completion.prompts if isinstance(prompt, list)]
        encoded = await self.encode_all(texts, field="prompt", add_special_tokens=completion.add_special_tokens)
        for index, token_ids in enumerate(encoded):
            if not token_ids:
                raise InvalidParameter(f"prompt[{index}] is empty: it has no tokens", param="prompt")
        return encoded

    async def encode_all(
        self, texts: list[str], *, field: str, add_special_tokens: bool, seam: str = ""
    ) -> list[list[int]]:
        """Tokenize texts, without the seam's tokens.

        Raises:
            InvalidParameter: if it takes too long.
        """
        if sum(map(len, texts)) <= SHORT_TEXT:
            return await self._tokenizer.encode_all(texts, add_special_tokens=add_special_tokens, seam=seam)
        return [await self._encode_long(text, seam, field, add_special_tokens) for text in texts]

    async def _encode_long(self, text: str, seam: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            token_ids, error = await self._children.ask(
                ["encode", [text, seam], add_special_tokens], MAX_ENCODE_SECONDS
            )
        except ChildTooSlowError:
            error = f"it takes longer than {MAX_ENCODE_SECONDS:g} seconds"
        except ChildDiedError:
            error = "it takes too much memory, or crashes the tokenizer"
        except ChildUnusableError as unusable:
            error = str(unusable)
        if error:
            log.warning("tokenizing given up", num_chars=len(text), reason=error)
            raise InvalidParameter(f"{field} cannot be tokenized: {error}", param=field)
        return [int(token_id) for token_id in token_ids]

    async def _render(self, conversation: ValidConversation, rules: Rules) -> tuple[str, str]:
        limit = MAX_BYTES_PER_TOKEN * rules.max_model_len
        question = ["render", conversation, limit]
        try:
            rendered, error = await self._children.ask(question, MAX_RENDER_SECONDS)
        except ChildTooSlowError:
            log.warning("chat template given up", seconds=MAX_RENDER_SECONDS)
            error = f"the chat template takes longer than {MAX_RENDER_SECONDS:g} seconds on these messages"
        except ChildDiedError:
            log.warning("chat template process died")
            error = "the chat template takes too much memory on these messages, or crashes"
        except ChildUnusableError as unusable:
            error = str(unusable)
        if error:
            raise TemplateFailed(error, param="messages")
        if rendered is None:
            raise ContextLengthExceeded(
                f"the chat template turns these messages into more than {limit} characters; "
                f"{rules.max_model_len} tokens of context hold at most {limit} bytes",
                param="messages",
            )
        text, seam = rendered
        return str(text), str(seam)
