"""Prompts to token ids, off the event loop: rendering a chat template and tokenizing."""

import asyncio

from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.frontend.service import TextModel
from penstock.frontend.validate import Rules, check_text_size
from penstock.frontend.validate_chat import ValidConversation
from penstock.frontend.validate_completion import ValidCompletion


async def render_and_encode(
    model: TextModel, conversation: ValidConversation, rules: Rules, *, add_special_tokens: bool = False
) -> list[int]:
    """A conversation's prompt. Templates write their own special tokens, so none are added by default.

    Raises:
        TemplateFailed: if the template refuses the messages.
        ContextLengthExceeded: if the text cannot fit, whatever its tokens.
    """
    template = model.template
    assert template is not None, "validate_conversation has refused this"

    def work() -> list[int]:
        text = template.render(
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=conversation.variables,
            tools=conversation.tools,
        )
        check_text_size("messages", text, rules)
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    token_ids = await asyncio.get_running_loop().run_in_executor(model.tokenizer.threads, work)
    if not token_ids:
        raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
    return token_ids


async def encode_prompts(model: TextModel, completion: ValidCompletion) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
        InvalidParameter: if a prompt has no tokens.
    """
    texts = [prompt for prompt in completion.prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in completion.prompts if isinstance(prompt, list)]
    encoded = await model.tokenizer.encode_all(texts, add_special_tokens=completion.add_special_tokens)
    for index, token_ids in enumerate(encoded):
        if not token_ids:
            raise InvalidParameter(f"prompt[{index}] is empty: it has no tokens", param="prompt")
    return encoded
