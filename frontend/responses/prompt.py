"""A response's prompt: its conversation as the chat template writes it, cut from its beginning if it may be."""

from dataclasses import replace

from penstock.frontend.api.prompts import PromptReader
from penstock.frontend.errors import ContextLengthExceeded
from penstock.frontend.responses.validate import ValidResponse
from penstock.frontend.validation.common import Rules


async def response_prompt(prompts: PromptReader, valid: ValidResponse, rules: Rules) -> list[int]:
    """The token ids. With `truncation: auto`, the oldest turns go until the rest fits; instructions stay.

    Raises:
        ContextLengthExceeded: if not even the last turn fits.
        TemplateFailed: if the template refuses the messages, or does not come to an end.
    """
    if not valid.truncates:
        return valid.chat.common.truncated(await prompts.render_and_encode(valid.chat.conversation, rules))
    messages = valid.chat.conversation.messages
    num_first = next((i for i, message in enumerate(messages) if message["role"] not in _KEPT), len(messages))
    # A turn begins with a user's message; what it was answered is of no use without it.
    starts = [i for i, message in enumerate(messages) if i >= num_first and message["role"] == "user"]
    starts = [num_first, *(i for i in starts if i > num_first)]
    low, high = 0, len(starts) - 1  # which of them the prompt begins with: the first that fits
    fitting: list[int] | None = None
    while low <= high:
        middle = (low + high) // 2 if fitting is not None or low else 0  # mostly all of it fits
        kept = replace(valid.chat.conversation, messages=messages[:num_first] + messages[starts[middle] :])
        try:
            prompt = await prompts.render_and_encode(kept, rules)
            valid.chat.common.max_tokens_after(len(prompt))
        except ContextLengthExceeded:
            if middle == len(starts) - 1:
                raise
            low = middle + 1
        else:
            fitting, high = prompt, middle - 1
    assert fitting is not None
    return fitting


_KEPT = ("system", "developer")
