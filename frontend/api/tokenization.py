"""POST /tokenize and /detokenize, in vLLM's shapes. They need no engine."""

import asyncio

import msgspec

from penstock.frontend import schema
from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.chat import validate_conversation
from penstock.frontend.validation.common import MAX_BYTES_PER_TOKEN, check_model, check_text_size
from penstock.frontend.validation.tokens import check_token_ids
from penstock.frontend.validation.tools import validate_tools

_SLICE = 8192


async def tokenize(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Token ids of a text, or of a chat as its template renders it."""
    request = await read(schema.TOKENIZE, record, body)
    service = await service.serving(request.model)
    rules = service.rules()
    check_model(request.model, rules)
    model = service.model
    if request.messages is not None:
        tools = validate_tools(request.tools, None, None, model.template, rules)
        conversation = validate_conversation(
            request.messages,
            rules,
            model.template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            tools=None if tools is None else tools.definitions,
        )
        record.warnings += conversation.warnings
        prompt = await service.prompts.render_and_encode(
            conversation, rules, record, add_special_tokens=bool(request.add_special_tokens)
        )
        token_ids = prompt.token_ids
    elif request.prompt is not None:
        check_text_size("prompt", request.prompt, rules)
        add_special_tokens = request.add_special_tokens is not False
        [token_ids] = await service.prompts.encode_all(
            [request.prompt], record.tenant, field="prompt", add_special_tokens=add_special_tokens
        )
    else:
        raise InvalidParameter("prompt or messages is required", param="prompt")
    answer = schema.TokenizeAnswer(
        count=len(token_ids),
        max_model_len=service.max_model_len,
        tokens=token_ids,
        token_strs=await _token_strs(model.tokenizer, token_ids) if request.return_token_strs else None,
    )
    return Reply(msgspec.json.encode(answer))


async def _token_strs(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    """The names of the tokens, looked up in pieces: a long context would block the event loop."""
    found: list[str] = []
    for begin in range(0, len(token_ids), _SLICE):
        found += [tokenizer.token_text(token_id) for token_id in token_ids[begin : begin + _SLICE]]
        await asyncio.sleep(0)
    return found


async def tokenizer_info(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /tokenizer_info: the checkpoint's tokenizer_config.json, with the chat template that is in use."""
    model = service.model
    template = None if model.template is None else model.template.source
    return Reply(msgspec.json.encode({**model.tokenizer_config, "chat_template": template}))


async def detokenize(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The text of token ids."""
    request = await read(schema.DETOKENIZE, record, body)
    service = await service.serving(request.model)
    rules = service.rules()
    check_model(request.model, rules)
    if request.tokens is None:
        raise InvalidParameter("tokens is required", param="tokens")
    # As many tokens as /tokenize may return: each stands for at least one byte.
    check_token_ids("tokens", request.tokens, rules.vocab_size, MAX_BYTES_PER_TOKEN * rules.max_model_len)
    text = await service.prompts.decode(request.tokens, record.tenant)
    return Reply(msgspec.json.encode(schema.DetokenizeAnswer(prompt=text)))
