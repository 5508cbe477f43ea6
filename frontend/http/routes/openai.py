"""Chats, completions, models and tokens, as OpenAI's clients and vLLM's expect them."""

from penstock.frontend import schema
from penstock.frontend.api import operations, tokenization
from penstock.frontend.api.chat import chat_completions
from penstock.frontend.api.completions import completions
from penstock.frontend.api.infill import infill
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES, LOOKS_UP, READS_BODY
from penstock.frontend.schema_infill import InfillAnswer, InfillRequest

ROUTES = (
    Route(
        "POST", "/v1/chat/completions", chat_completions, "Answer a conversation",
        schema.ChatCompletion, schema.ChatRequest, GENERATES, streams=True, required=("messages",),
    ),
    Route(
        "POST", "/v1/completions", completions, "Continue texts",
        schema.Completion, schema.CompletionRequest, GENERATES, streams=True, required=("prompt",),
    ),
    Route(
        "POST", "/infill", infill, "Fill in the middle, as llama.cpp",
        InfillAnswer, InfillRequest, GENERATES, streams=True, required=("input_prefix", "input_suffix"),
    ),
    Route(
        "GET", "/v1/models", operations.list_models, "The models that are served",
        schema.ModelList, errors=(500,),
    ),
    Route(
        "GET", "/v1/models/{id}", operations.show_model, "One model",
        schema.ModelCard, errors=LOOKS_UP, argument=".+",
    ),
    Route(
        "POST", "/tokenize", tokenization.tokenize, "Token ids of a text or a chat",
        schema.TokenizeAnswer, schema.TokenizeRequest, READS_BODY,
    ),
    Route(
        "POST", "/detokenize", tokenization.detokenize, "The text of token ids",
        schema.DetokenizeAnswer, schema.DetokenizeRequest, READS_BODY, required=("tokens",),
    ),
    Route("GET", "/tokenizer_info", tokenization.tokenizer_info, "The tokenizer's configuration", errors=(500,)),
)  # fmt: skip
