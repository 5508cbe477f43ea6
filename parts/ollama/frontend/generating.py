"""POST /api/chat and /api/generate"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.frontend.api.body import read
from penstock.frontend.api.chat import submit_chat
from penstock.frontend.api.infill import filled_prompts, infill_format, with_ends
from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.api.truncation import fitting_prompt
from penstock.frontend.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.parsing.parser import PLAIN, OutputFormat
from penstock.frontend.schema import ChatRequest, CompletionRequest
from penstock.frontend.validation.chat import ValidChat, validate_chat
from penstock.frontend.validation.common import Rules
from penstock.frontend.validation.completion import ValidCompletion, validate_completion
from penstock.frontend.validation.tokens import check_token_ids
from penstock.parts.ollama.frontend.answers import (
    CHAT_DIALECT,
    GENERATE_DIALECT,
    HEADERS,
    RAW_DIALECT,
    Dialect,
    Lines,
    loaded,
    whole,
)
from penstock.parts.ollama.frontend.messages import chat_messages
from penstock.parts.ollama.frontend.options import (
    image_parts,
    read_options,
    refuse_template,
    served_name,
    serving,
    set_sampling,
    thinking_variables,
    with_options,
)
from penstock.parts.ollama.frontend.schema import (
    CHAT,
    GENERATE,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)

_ZERO = re.compile(r"0+(\.0+)?(ns|us|ms|s|m|h)?")
"""How clients write a time of nothing, as which they ask for the model to be unloaded."""


async def chat(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a conversation; without messages, say that the model is loaded.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(CHAT, record, body), len(body)
    service = await serving(service, request.model)
    with await service.admit(record, num_bytes) as admission:
        if not request.messages:
            return _loaded(service, record, request, CHAT_DIALECT)
        asked = _chat_of(request, admission.rules)
        valid = _valid_chat(service, request, asked, admission.rules)
        admission.hold(valid.common)
        is_cut = request.truncate is not False
        del body, request, asked  # they may be large
        run, output_format = await _submit_chat(service, record, valid, admission.rules, is_cut=is_cut)
    del valid  # its conversation may be large too, and generating takes long
    return await _reply(run, CHAT_DIALECT, output_format)


async def generate(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer or continue a text; without one, say that the model is loaded.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(GENERATE, record, body), len(body)
    dialect, output_format = RAW_DIALECT, PLAIN
    service = await serving(service, request.model)
    with await service.admit(record, num_bytes) as admission:
        rules = admission.rules
        if not (request.prompt or request.suffix):
            return _loaded(service, record, request, GENERATE_DIALECT)
        asked = _prompt_of(service, request, rules)
        valid: ValidChat | ValidCompletion
        if isinstance(asked, CompletionRequest):
            valid = _valid_text(service, request, asked, rules)
            admission.hold(valid.common)
            run = await _submit_text(service, record, valid)
        else:
            valid = _valid_chat(service, request, asked, rules)
            admission.hold(valid.common)
            is_cut, context = request.truncate is not False, request.context or []
            dialect = GENERATE_DIALECT
            run, output_format = await _submit_chat(service, record, valid, rules, is_cut=is_cut, context=context)
    del body, request, asked, valid  # they may be large, and generating takes long
    return await _reply(run, dialect, output_format)


def _loaded(service: Service, record: RequestRecord, request: OllamaRequest, dialect: Dialect) -> Reply:
    """The answer to a request without a prompt or messages: it only loads or unloads the model."""
    name = served_name(request.model, service.model.names)
    is_unload = _ZERO.fullmatch(str(request.keep_alive)) is not None
    if is_unload:
        record.warnings.append("keep_alive: no effect, the model stays loaded")
    return Reply(loaded(dialect, request.model or name, "unload" if is_unload else "load"))


def _chat_of(request: OllamaChatRequest, rules: Rules) -> ChatRequest:
    messages = chat_messages(request.messages or [], request.model or rules.model_names[0], rules.images)
    for index, tool in enumerate(request.tools or []):
        if tool.get("type") != "function":  # custom tools: calls have objects as arguments here, not texts
            raise InvalidParameter(f"tools[{index}].type must be 'function'", param=f"tools[{index}].type")
    return ChatRequest(messages=messages, tools=request.tools or None)


def _prompt_of(service: Service, request: OllamaGenerateRequest, rules: Rules) -> ChatRequest | CompletionRequest:
    """A chat of one message, which the chat template renders; or a text that is continued as it is."""
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
        return CompletionRequest(prompt=request.prompt or "", suffix=request.suffix or None)
    if request.context:
        check_token_ids("context", request.context, rules.vocab_size)
    system = [{"role": "system", "content": request.system}] if request.system else []
    said: Any = request.prompt or ""
    if images:
        said = [*images, {"type": "text", "text": said}]
    messages = [*system, {"role": "user", "content": said}]
    return ChatRequest(messages=messages)


def _valid_chat(service: Service, request: OllamaRequest, chat: ChatRequest, rules: Rules) -> ValidChat:
    """Check a chat with the options of its request."""
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
    return replace(checked, common=with_options(checked.common, request, options, warnings, rules))


async def _submit_chat(
    service: Service,
    record: RequestRecord,
    valid: ValidChat,
    rules: Rules,
    *,
    is_cut: bool,
    context: Sequence[int] = (),
) -> tuple[Run, OutputFormat]:
    """Send a chat to the engine, after the tokens of earlier turns. If `is_cut`, turns that do not fit are dropped."""
    common, conversation = valid.common, valid.conversation
    record.warnings += conversation.warnings
    if is_cut:
        prompt = await fitting_prompt(service.prompts, common, conversation, rules, record)
    else:
        prompt = await service.prompts.render_and_encode(conversation, rules, record)
    if context and prompt.token_ids[0] == service.model.tokenizer.bos_token_id:
        prompt = prompt.without_first()  # the token that begins a text must not come twice
    if context:
        prompt = prompt.after([*context])
    return await submit_chat(service, record, valid, prompt)


def _valid_text(
    service: Service, request: OllamaGenerateRequest, text: CompletionRequest, rules: Rules
) -> ValidCompletion:
    """Check a text that is continued without a template, or filled in between prompt and suffix."""
    refuse_template(request.template)
    options, warnings = read_options(request.options)
    set_sampling(text, options)
    text.model = served_name(request.model, rules.model_names)
    text.stream = request.stream is not False
    if request.logprobs:
        text.logprobs = request.top_logprobs or 0
    if request.suffix and service.model.infill is None:
        raise UnsupportedParameter(f"{request.model!r} does not support insert", param="suffix")
    if request.think:
        raise UnsupportedParameter("think is not supported together with raw or suffix", param="think")
    checked = validate_completion(text, rules)
    valid = replace(checked, common=with_options(checked.common, request, options, warnings, rules))
    if valid.suffix:
        infill = infill_format(service, "suffix")
        valid = replace(valid, common=with_ends(valid.common, infill, ignore_eos=False))
    return valid


async def _submit_text(service: Service, record: RequestRecord, valid: ValidCompletion) -> Run:
    if valid.suffix:
        prompts = await filled_prompts(service, valid, record.tenant)
    else:
        prompts = await service.prompts.encode_prompts(valid, record.tenant)
    return await submit(service, record, valid.common, prompts)


async def _reply(run: Run, dialect: Dialect, output_format: OutputFormat) -> Reply | StreamReply:
    with run:
        if not run.valid.stream:
            return Reply(await whole(run, dialect, output_format))
        lines = Lines(run, dialect, output_format)
        await run.first_news()
        return run.streamed(lines, headers=HEADERS)
