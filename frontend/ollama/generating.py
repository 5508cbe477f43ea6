"""POST /api/chat and /api/generate"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from penstock.frontend.api.chat import prepared_chat
from penstock.frontend.api.infill import filled_prompts, infill_format, with_ends
from penstock.frontend.api.run import Job, Prepared, read, run
from penstock.frontend.api.service import Service
from penstock.frontend.api.truncation import fitting_prompt
from penstock.frontend.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.ollama.answers import (
    CHAT_DIALECT,
    FRAMING,
    GENERATE_DIALECT,
    RAW_DIALECT,
    Dialect,
    Lines,
    loaded,
    whole,
)
from penstock.frontend.ollama.messages import chat_messages
from penstock.frontend.ollama.options import (
    image_parts,
    read_options,
    refuse_template,
    served_name,
    set_sampling,
    thinking_variables,
    with_options,
)
from penstock.frontend.ollama.schema import (
    CHAT,
    GENERATE,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from penstock.frontend.parsing.parser import PLAIN
from penstock.frontend.prompt import Prompt
from penstock.frontend.schema import ChatRequest, CompletionRequest
from penstock.frontend.validation.chat import ValidChat, validate_chat
from penstock.frontend.validation.common import Rules
from penstock.frontend.validation.completion import validate_completion
from penstock.frontend.validation.tokens import check_token_ids


class _Said(msgspec.Struct):
    """The fields that say whether a request has a prompt or messages; one without only loads or unloads the model."""

    model: str | None = None
    keep_alive: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    suffix: msgspec.Raw = msgspec.Raw(b"")


_SAID = msgspec.json.Decoder(_Said)
_ZERO = re.compile(rb'\s*"?0+(\.0+)?(ns|us|ms|s|m|h)?"?\s*')
"""How clients write a time of nothing, as which they ask for the model to be unloaded."""

_NOTHING = (b"", b"null", b'""', b"[]")


async def chat(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a conversation; without messages, say that the model is loaded."""
    reply = await _only_loads(service, record, CHAT, body, CHAT_DIALECT)
    return reply or await run(CHAT, _chat_job, service, record, body)


async def generate(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer or continue a text; without one, say that the model is loaded."""
    reply = await _only_loads(service, record, GENERATE, body, GENERATE_DIALECT)
    return reply or await run(GENERATE, _generate_job, service, record, body)


async def _only_loads(
    service: Service, record: RequestRecord, decoder: msgspec.json.Decoder[Any], body: bytes, dialect: Dialect
) -> Reply | None:
    await heavy_turn(len(body))
    try:
        said = _SAID.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # `run` reports what is wrong
    if any(bytes(part).strip() not in _NOTHING for part in (said.messages, said.prompt, said.suffix)):
        return None
    await read(decoder, record, body)
    await service.admit(record)
    name = served_name(said.model, service.model.names)
    is_unload = _ZERO.fullmatch(said.keep_alive) is not None
    if is_unload:
        record.warnings.append("keep_alive: no effect, the model stays loaded")
    return Reply(loaded(dialect, said.model or name, "unload" if is_unload else "load"))


async def _chat_job(
    service: Service, record: RequestRecord, request: OllamaChatRequest, rules: Rules, num_bytes: int
) -> Job:
    messages = chat_messages(request.messages or [], request.model or rules.model_names[0], rules.images)
    for index, tool in enumerate(request.tools or []):
        if tool.get("type") != "function":  # custom tools: calls have objects as arguments here, not texts
            raise InvalidParameter(f"tools[{index}].type must be 'function'", param=f"tools[{index}].type")
    chat = ChatRequest(messages=messages, tools=request.tools or None)
    return _chatting(service, record, request, chat, rules, CHAT_DIALECT, [])


async def _generate_job(
    service: Service, record: RequestRecord, request: OllamaGenerateRequest, rules: Rules, num_bytes: int
) -> Job:
    name = request.model or rules.model_names[0]
    images = image_parts("images", request.images, name, rules.images)
    for field in ("width", "height", "steps"):
        if getattr(request, field):
            raise UnsupportedParameter(f"{field}: {name!r} does not make images", param=field)
    if request.raw and (request.template or request.system or request.context):
        raise InvalidParameter("raw mode does not support template, system, or context", param="raw")
    has_template = service.model.template is not None
    if request.raw or request.suffix or not has_template:
        for field in ("system", "context", "images"):
            if getattr(request, field):
                raise UnsupportedParameter(
                    f"{field}: a text that is continued as it is has no place for it", param=field
                )
        return _continuing(service, record, request, rules)
    context = request.context or []
    if context:
        check_token_ids("context", context, rules.vocab_size)
    system = [{"role": "system", "content": request.system}] if request.system else []
    said: Any = request.prompt or ""
    if images:
        said = [*images, {"type": "text", "text": said}]
    messages = [*system, {"role": "user", "content": said}]
    return _chatting(service, record, request, ChatRequest(messages=messages), rules, GENERATE_DIALECT, context)


def _chatting(
    service: Service,
    record: RequestRecord,
    request: OllamaRequest,
    chat: ChatRequest,
    rules: Rules,
    dialect: Dialect,
    context: list[int],
) -> Job:
    """A request that is rendered by the chat template, after the tokens of earlier turns."""
    model, name = service.model, request.model or rules.model_names[0]
    refuse_template(request.template)
    options, warnings = read_options(request.options)
    set_sampling(chat, options)
    chat.model = served_name(request.model, rules.model_names)
    chat.stream = request.stream is not False
    chat.logprobs, chat.top_logprobs = request.logprobs, request.top_logprobs if request.logprobs else None
    chat.chat_template_kwargs = thinking_variables(request.think, model, name)
    chat.include_reasoning = request.think is not False
    if model.template is None:
        raise InvalidRequest(f"{name!r} does not support chat: it has no chat template; /api/generate continues texts")
    if chat.tools and model.tool_format is None:
        raise UnsupportedParameter(f"{name!r} does not support tools", param="tools")
    checked = validate_chat(chat, rules, model.template)
    valid = replace(checked, common=with_options(checked.common, request, options, warnings, rules))

    async def prepare() -> Prepared:
        record.warnings += valid.conversation.warnings
        prompt = await _prompt(service, valid, rules, record, is_cut=request.truncate is not False)
        if context and prompt.token_ids[0] == model.tokenizer.bos_token_id:
            prompt = prompt.without_first()  # the token that begins a text must not come twice
        if context:
            prompt = prompt.after(context)
        made = prepared_chat(service, valid, prompt, partial(Lines, dialect), partial(whole, dialect))
        return replace(made, framing=FRAMING)

    return Job(valid.common, prepare)


async def _prompt(service: Service, valid: ValidChat, rules: Rules, record: RequestRecord, *, is_cut: bool) -> Prompt:
    if is_cut:
        return await fitting_prompt(service.prompts, valid.common, valid.conversation, rules, record)
    return await service.prompts.render_and_encode(valid.conversation, rules, record)


def _continuing(service: Service, record: RequestRecord, request: OllamaGenerateRequest, rules: Rules) -> Job:
    """A request whose text is continued without a template, or filled in between prompt and suffix."""
    refuse_template(request.template)
    options, warnings = read_options(request.options)
    completion = CompletionRequest(prompt=request.prompt or "", suffix=request.suffix or None)
    set_sampling(completion, options)
    completion.model = served_name(request.model, rules.model_names)
    completion.stream = request.stream is not False
    if request.logprobs:
        completion.logprobs = request.top_logprobs or 0
    if request.suffix and service.model.infill is None:
        raise UnsupportedParameter(f"{request.model!r} does not support insert", param="suffix")
    if request.think:
        raise UnsupportedParameter("think is not supported together with raw or suffix", param="think")
    checked = validate_completion(completion, rules)
    valid = replace(checked, common=with_options(checked.common, request, options, warnings, rules))

    if valid.suffix:
        infill = infill_format(service, "suffix")
        valid = replace(valid, common=with_ends(valid.common, infill, ignore_eos=False))

    async def prepare() -> Prepared:
        if valid.suffix:
            [prompt] = await filled_prompts(service, valid, record.tenant)
        else:
            [prompt] = await service.prompts.encode_prompts(valid, record.tenant)
        return Prepared(
            [prompt],
            valid.common.grammar,
            partial(Lines, RAW_DIALECT, PLAIN),
            partial(whole, RAW_DIALECT, PLAIN),
            framing=FRAMING,
        )

    return Job(valid.common, prepare)
