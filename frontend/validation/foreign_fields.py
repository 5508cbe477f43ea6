"""Fields that clients of other engines send, on any route: other names, hints, and samplers that do not exist here.

Only fields that a route's own schema does not have are looked up here, so the names of a route always mean what that
route says. What can be honoured is; what has no effect is accepted with a warning; what would change the answer is
refused, unless its value asks for nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.config.samplers import fields, parameters
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter


class ForeignField(NamedTuple):
    """What becomes of a field's values, other than null."""

    same: tuple[Any, ...] = (False,)  # these ask for nothing, or for what is done anyway: accepted
    hint: str = ""  # any other value is accepted, with this explanation why it has no effect
    use: str = ""  # or it is refused; what to use instead, if there is something
    depends: bool = False  # it only matters with another field, which is refused: accepted


SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict", "max_new_tokens"),
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty", "rep_pen"),
    ("stop", "stop_sequences", "stopping_strings"),
    ("seed", "random_seed"),
    *((each.name, *each.synonyms) for each in parameters() if each.synonyms),
    ("beam_width", "num_beams"),
    ("tfs_z", "tfs"),
    ("include_stop_str_in_output", "no_stop_trim"),
)
"""Names of one parameter. A route has some of them in its schema. If the request has none of those, the first other
name in this order counts."""

_COUNTS = SYNONYMS[0]
"""Negative counts mean "no limit" where some of these names come from; here that is -1."""

GREEDY = "do_sample"
"""The name under which some clients send false for a temperature of 0."""

_CACHES = ForeignField((True,), hint="prompts are always cached")
_LATER = ForeignField((0, 1, -1, []), hint="it is decided when the server starts")
_ORDER = ForeignField(([], "", 0), hint="samplers have a fixed order")
_OFF_AT_0, _OFF_AT_1 = ForeignField((0,)), ForeignField((1,))
_WITH_ANOTHER = ForeignField(depends=True)
_EFFORT = ForeignField((), hint="chat_template_kwargs sets the variables of chat templates")
_DRAFTS = ForeignField(hint="`speculative` limits what is drafted")

OF_SAMPLERS = ForeignField((), hint="this route draws no tokens")
"""What becomes of the fields of samplers on routes that do not have them."""

FOREIGN_FIELDS: Mapping[str, ForeignField] = {
    # Samplers.
    **dict.fromkeys(
        ("typical_p", "typical", "tfs_z", "tfs", "guidance_scale", "encoder_repetition_penalty"), _OFF_AT_1
    ),
    **dict.fromkeys(("length_penalty", "num_beams"), _OFF_AT_1),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range"), _OFF_AT_0),
    **dict.fromkeys(("top_a", "smoothing_factor", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), _OFF_AT_0),
    **dict.fromkeys(("no_repeat_ngram_size", "repetition_detection"), _OFF_AT_0),
    **dict.fromkeys(("top_n_sigma", "nsigma"), ForeignField((0, -1))),
    "adaptive_target": ForeignField((-1, 0)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base"), _WITH_ANOTHER),
    **dict.fromkeys(("dry_allowed_length", "dry_penalty_last_n", "dry_range"), _WITH_ANOTHER),
    **dict.fromkeys(("dry_sequence_breakers", "smoothing_curve", "adaptive_decay", "negative_prompt"), _WITH_ANOTHER),
    **dict.fromkeys(("use_beam_search", "dynamic_temperature", "watermark"), ForeignField()),
    "early_stopping": _WITH_ANOTHER,
    GREEDY: ForeignField((True,), hint="temperature says how tokens are drawn"),
    "stop_regex": ForeignField(([], ""), use="stop"),
    "structural_tag": ForeignField(use="response_format with type structural_tag"),
    "logits_processors": ForeignField(([],)),
    "custom_logit_processor": ForeignField(("",), use="logits_processors, by the names that the server knows"),
    "custom_params": _WITH_ANOTHER,
    "repeat_last_n": ForeignField((-1,), hint="penalties look at the whole text"),
    "penalize_nl": ForeignField((True,), hint="line breaks are tokens like others"),
    "min_keep": ForeignField((0, 1), hint="at least one token is kept"),
    **dict.fromkeys(("samplers", "sampler_order", "sampler_priority", "temperature_last"), _ORDER),
    "n_probs": ForeignField((0,), use="logprobs"),
    "logprob_token_ids": ForeignField(([],)),
    # Prompts.
    "chat_template": ForeignField(("",), use="--chat-template when the server starts"),
    "documents": ForeignField(([],)),
    "prompt_embeds": ForeignField(([],)),
    "image_data": ForeignField(([],), use="messages with images"),
    "echo": ForeignField(),
    "add_special_tokens": ForeignField(),
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs"), ForeignField(({}, False), hint="images are read in one way")
    ),
    **dict.fromkeys(("enable_thinking", "thinking_forced_open"), _EFFORT),
    **dict.fromkeys(("cache_prompt", "enable_caching"), _CACHES),
    # What the answer holds.
    "modalities": ForeignField((["text"], [])),
    "audio": ForeignField(),
    "prediction": ForeignField(hint="outputs are drafted from the prompt, see `speculative`"),
    "web_search_options": ForeignField(hint="this server searches nothing"),
    "spaces_between_special_tokens": ForeignField((True,), hint="special tokens are never separated by spaces"),
    "separate_reasoning": ForeignField((True,), hint="reasoning always has a field of its own"),
    "stream_reasoning": ForeignField((True,), hint="reasoning is streamed as it comes"),
    "reasoning_format": ForeignField(("auto", "deepseek"), hint="reasoning always has a field of its own"),
    "parse_tool_calls": ForeignField((True,), hint="calls are always parsed"),
    "timings_per_token": ForeignField(hint="return_timings adds the server's times"),
    "return_hidden_states": ForeignField(),
    "return_routed_experts": ForeignField(),
    # Of other engines' inside.
    "options": ForeignField(({},), use="the fields of this API"),
    "format": ForeignField(("",), use="response_format"),
    "kv_transfer_params": ForeignField(({},)),
    "vllm_xargs": ForeignField(({},), hint="logits_processors has the arguments of each"),
    **dict.fromkeys(("lora_path", "adapter_id", "lora"), ForeignField(("", []), use="`model` with the adapter's name")),
    **dict.fromkeys(("id_slot", "slot_id", "n_keep", "n_discard", "num_ctx", "n_ctx"), _LATER),
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_whitespace_pattern"), ForeignField(hint="there is one backend")
    ),
    **dict.fromkeys(("request_id", "rid"), ForeignField(hint="the header x-request-id sets the request's id")),
    **dict.fromkeys(("speculative.n_max", "speculative.n_min", "speculative.p_min", "draft_model"), _DRAFTS),
    "keep_alive": ForeignField(hint="the model stays loaded for as long as the server runs"),
    "t_max_predict_ms": ForeignField((0, -1), hint="the header x-request-timeout limits the time"),
    **dict.fromkeys((name for name, *_ in fields()), OF_SAMPLERS),
    **dict.fromkeys((name for each in parameters() for name in each.synonyms), OF_SAMPLERS),
}
"""By name; fields that are in no table are ignored with a warning."""

_GROUPS = {name: group for group in SYNONYMS for name in group}


def take_foreign_fields(request: msgspec.Struct, given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Take the fields that a request's own schema does not have.

    Synonyms are written into the request.

    Args:
        request: the decoded request.
        given: all its fields as they were sent, decoded or as `msgspec.Raw`; those of its own schema are skipped.
        prefix: in front of field names in messages.

    Returns:
        Warnings about what has no effect.

    Raises:
        InvalidParameter: a synonym's value has the wrong type.
        UnsupportedParameter: a field asks for what does not exist here.
    """
    own = frozenset(request.__struct_encode_fields__)
    others = {name: value for name, value in given.items() if name not in own}
    if not others:
        return []
    warnings = []
    for name in _in_order(others):
        group = [each for each in _GROUPS.get(name, ()) if each in own]
        if group:
            warnings += _take_synonym(request, group, name, _value(others[name]), prefix)
        elif name == GREEDY and "temperature" in own and _value(others[name]) is False:
            warnings += _take_synonym(request, ["temperature"], name, 0.0, prefix)
        elif name in FOREIGN_FIELDS:
            warnings += _take(name, FOREIGN_FIELDS[name], others[name], prefix)
        else:
            kind = "option" if prefix else "field"
            warnings.append(f"{prefix}{name[:64]}: an unknown {kind}, ignored")
    return warnings


def _in_order(others: Mapping[str, Any]) -> list[str]:
    """The names as given, but those of one parameter by their rank."""
    if not any(name in _GROUPS for name in others):
        return list(others)
    ranked = [name for group in SYNONYMS for name in group if name in others]
    return [*ranked, *(name for name in others if name not in _GROUPS)]


def _take_synonym(request: msgspec.Struct, own: list[str], name: str, value: Any, prefix: str) -> list[str]:
    """Write a value into the request's own field, unless one of its own names was given."""
    if value is None:
        return []
    if name in _COUNTS and isinstance(value, int) and value < 0:
        value = -1
    field = own[0]
    kind = next(each.type for each in msgspec.structs.fields(type(request)) if each.name == field)
    value = [value] if field == "stop_sequences" and isinstance(value, str) else as_whole(value)
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at `")[0]
        param = f"{prefix}{name}"
        raise InvalidParameter(f"{param}: {what[:1].lower()}{what[1:200]}", param=param) from None
    given = next((each for each in own if getattr(request, each) is not None), None)
    if given is None:
        setattr(request, field, value)
    elif getattr(request, given) != value:
        return [f"{prefix}{name}: ignored, {prefix}{given} says something else"]
    return []


def _take(name: str, field: ForeignField, value: Any, prefix: str) -> list[str]:
    if field.depends:
        return []
    value = _value(value)
    if value is None or any(value == same for same in field.same):
        return []
    if field.hint:
        return [f"{prefix}{name}: no effect, {field.hint}"]
    if value is False:
        return []
    instead = f"; use {field.use}" if field.use else ""
    raise UnsupportedParameter(f"{prefix}{name} is not supported{instead}", param=f"{prefix}{name}")


def _value(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def as_whole(value: Any) -> Any:
    """A whole number as an integer, though it was written with a fraction; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
