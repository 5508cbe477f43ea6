"""Drops the oldest turns of conversations that are longer than the context."""

from dataclasses import replace

from penstock.frontend.api.service import PromptReader
from penstock.frontend.errors import ContextLengthExceeded
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.prompt import Prompt
from penstock.frontend.text.chat_template import ValidConversation, num_images
from penstock.frontend.validation.common import Rules, ValidRequest


async def fitting_prompt(
    prompts: PromptReader, common: ValidRequest, conversation: ValidConversation, rules: Rules, record: RequestRecord
) -> Prompt:
    """The prompt of a conversation without its oldest turns, so that the rest fits; instructions stay.

    Raises:
        ContextLengthExceeded: if not even the last turn fits.
        TemplateFailed: if the template refuses the messages, or does not come to an end.
    """
    messages = conversation.messages
    num_first = next(
        (i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages)
    )
    # A turn begins with a user's message; the answer to it is of no use without it.
    starts = [i for i, message in enumerate(messages) if i >= num_first and message["role"] == "user"]
    starts = [num_first, *(i for i in starts if i > num_first)]
    low, high = 0, len(starts) - 1  # search for the earliest start with which the prompt fits
    fitting: Prompt | None = None
    while low <= high:
        middle = (low + high) // 2 if fitting is not None or low else 0  # usually everything fits
        begins = starts[middle]
        kept = replace(conversation, messages=messages[:num_first] + messages[begins:])
        if conversation.images:
            num_left_out = sum(map(num_images, messages[num_first:begins]))
            num_before = sum(map(num_images, messages[:num_first]))
            images = conversation.images[:num_before] + conversation.images[num_before + num_left_out :]
            kept = replace(kept, images=images)
        try:
            prompt = await prompts.render_and_encode(kept, rules, record)
            common.max_tokens_after(len(prompt))
        except ContextLengthExceeded:
            if middle == len(starts) - 1:
                raise
            low = middle + 1
        else:
            fitting, high = prompt, middle - 1
    assert fitting is not None
    return fitting
