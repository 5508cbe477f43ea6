"""Which samplers a request uses, and in which order: from its fields to what is sent to the engine.

Without a sampler or an order of its own, nothing is sent, and the kernels draw with what they know themselves.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from penstock.config.samplers import Parameter, ProcessorUse, Sampler, fields, names, parameters, samplers
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.tokens import check_texts, shown
from penstock.ipc.messages import SamplerUse, SamplingParams

MAX_SAMPLER_TEXTS = 64
MAX_SAMPLER_TEXT_CHARACTERS = 64
MAX_ORDER = 64
MAX_PROCESSORS = 8
MAX_PROCESSOR_BYTES = 16_384

_IN_KERNELS = ("logit_bias", "penalties", "temperature", "min_p", "top_k", "top_p")
"""In the order in which the kernels apply them (`kernels/sampling/sampling.py`)."""

_ELSEWHERE = frozenset(
    (
        "tfs", "tfs_z", "top_a", "encoder_repetition_penalty", "no_repeat_ngram", "infill", "adaptive_p",
    )
)  # fmt: skip
"""Names in other engines' lists of what does not exist here: the fields that would switch these on are refused."""


@dataclass(frozen=True, slots=True)
class ValidSamplers:
    """What changes in the `SamplingParams` that are sent."""

    neutral: Mapping[str, Any]  # fields of what the kernels do not do for this request
    uses: tuple[SamplerUse, ...]
    texts: Mapping[str, tuple[str, ...]]  # by sampler; their last tokens are sent behind its values
    warnings: tuple[str, ...] = ()

    def applied(self, sampling: SamplingParams, tokenizer: TextTokenizer) -> SamplingParams:
        """The parameters to send."""
        uses = [
            msgspec.structs.replace(use, values=(*use.values, *_last_tokens(texts, tokenizer)))
            if (texts := self.texts.get(use.name, ()))
            else use
            for use in self.uses
        ]
        return msgspec.structs.replace(sampling, **self.neutral, samplers=tuple(uses))


def check_samplers(
    request: msgspec.Struct, sampling: SamplingParams, processors: Collection[str] = (), *, is_best_only: bool = False
) -> ValidSamplers | None:
    """Check the parameters of samplers, and the order; None if the kernels do all that is asked for.

    Args:
        request: what was asked for.
        sampling: its other parameters, checked.
        processors: names of the logits processors that it may ask for.
        is_best_only: whether its top-p is 0, which `sampling` says by a temperature of 0; an order may leave that out.

    Raises:
        InvalidParameter: a value is out of bounds.
    """
    if all(value is None for value in _asked()(request)):
        return None
    first = _processors(getattr(request, "logits_processors", None) or [], processors)
    given = msgspec.structs.asdict(sampling)
    if is_best_only:
        given["top_p"] = 0.0
    given |= {each.name: _checked(each, getattr(request, each.name)) for each in parameters()}
    used = {name: values for name, kind in samplers().items() if (values := kind.values(given)) is not None}
    keeper = _keeper(used)
    order, warnings = _order(request, [name for name in used if samplers()[name].replaces], keeper)
    uses = tuple(SamplerUse(name, used[name]) for name in order if name in used)
    if keeper and (lost := [name for name in used if name not in order]):
        warnings += (f"{keeper}: no effect beside it: {', '.join(lost)}",)
    in_kernels = [name for name in _IN_KERNELS if any(use.name == name for use in uses)]
    top_p_is_lost = is_best_only and "top_p" in in_kernels and "temperature" not in in_kernels
    if [use.name for use in uses] == in_kernels and not top_p_is_lost:
        neutral = _neutral([name for name in _IN_KERNELS if name not in in_kernels])
        return ValidSamplers(neutral, first, {}, warnings)
    texts = {use.name: samplers()[use.name].texts(given) for use in uses}
    return ValidSamplers(_neutral(_IN_KERNELS), (*first, *uses), texts, warnings)


def _processors(asked: list[str | ProcessorUse], known: Collection[str]) -> tuple[SamplerUse, ...]:
    """The logits processors of a request, which come before all samplers."""
    field, uses = "logits_processors", list[SamplerUse]()
    if len(asked) > MAX_PROCESSORS:
        raise InvalidParameter(f"{field} may hold at most {MAX_PROCESSORS}, got {len(asked)}", param=field)
    for i, each in enumerate(asked):
        use = ProcessorUse(each) if isinstance(each, str) else each
        name = use.name or use.qualname or ""
        if name not in known:
            have = f"those here: {', '.join(sorted(known)[:16])}" if known else "this server has none"
            raise InvalidParameter(f"{field}[{i}]: there is no logits processor {name[:64]!r}; {have}", param=field)
        given = use.args or {}
        if isinstance(given, list):
            raise InvalidParameter(f"{field}[{i}].args must be an object: names and values", param=field)
        arguments = msgspec.json.encode(given | (use.kwargs or {}))
        if len(arguments) > MAX_PROCESSOR_BYTES:
            raise InvalidParameter(
                f"{field}[{i}].args may have at most {MAX_PROCESSOR_BYTES} bytes, got {len(arguments)}", param=field
            )
        uses.append(SamplerUse(name, arguments=arguments.decode()))
    return tuple(uses)


@cache
def _asked() -> Any:
    """Gets the fields of a request that are about samplers."""
    found = [name for name, *_ in fields()]
    return attrgetter(*found) if found else lambda _: ()


def _neutral(kernels: Any) -> dict[str, Any]:
    known: Mapping[str, type[Sampler]] = samplers()
    return {field: value for name in kernels if name in known for field, value in known[name].neutral.items()}


def _checked(parameter: Parameter, value: Any) -> Any:
    name, default = parameter.name, parameter.default
    if value is None:
        return default
    if isinstance(default, tuple):
        texts = _texts(name, value)
        if len(texts) > MAX_SAMPLER_TEXTS:
            raise InvalidParameter(f"{name} may hold at most {MAX_SAMPLER_TEXTS} texts, got {len(texts)}", param=name)
        check_texts(name, texts, MAX_SAMPLER_TEXT_CHARACTERS)
        return tuple(dict.fromkeys(texts))
    if not isinstance(default, bool) and not parameter.low <= value <= parameter.high:  # NaN, too
        bounds = f"between {parameter.low:g} and {parameter.high:g}"
        raise InvalidParameter(f"{name} must be {bounds}, got {shown(value)}", param=name)
    return value


def _texts(name: str, value: list[str] | str) -> list[str]:
    """A list of texts; some clients send one as JSON in a text, with or without its brackets."""
    if isinstance(value, list):
        return value
    for form in (value, f"[{value}]"):
        try:
            return msgspec.json.decode(form, type=list[str])
        except msgspec.MsgspecError:
            continue
    raise InvalidParameter(f"{name} must be a list of texts, got {value[:64]!r}", param=name)


def _keeper(used: Iterable[str]) -> str:
    """The sampler in use that keeps something of its rows, and comes last; "" if there is none."""
    found = [name for name in used if samplers()[name].keeps]
    if len(found) > 1:
        raise InvalidParameter(f"{' and '.join(found)} exclude each other", param=found[1])
    return found[0] if found else ""


def _order(request: Any, replacing: list[str], keeper: str) -> tuple[list[str], tuple[str, ...]]:
    """The order of samplers, and warnings. Those that a list in `samplers` does not name are off.

    Those that `sampler_priority` does not name come first. What it names behind `keeper` is off.

    Args:
        request: what was asked for.
        replacing: those in use that replace another one.
        keeper: the one in use that comes last; it may allow few others where no `sampler_priority` names them.
    """
    order, warnings = [*samplers()], []
    for field in ("samplers", "sampler_priority"):
        if not (asked := getattr(request, field)):
            continue
        found = []
        for name in _listed(asked)[: MAX_ORDER + 1]:
            if known := names().get(name.strip().lower()):
                found.append(known)
            elif name not in _ELSEWHERE:
                warnings.append(f"{field}: there is no sampler {name[:32]!r}, skipped")
        if len(found) > MAX_ORDER:
            raise InvalidParameter(f"{field} may name at most {MAX_ORDER} samplers", param=field)
        found = [*dict.fromkeys(found)]
        first = ["logit_bias"] if field == "samplers" else [name for name in order if name not in found]
        if keeper in found:
            found = found[: found.index(keeper)]
        for name in replacing:
            if name in found:  # it has a place of its own
                first, found = ([each for each in its if each != samplers()[name].replaces] for its in (first, found))
        order = [*dict.fromkeys((*first, *found))]
        break
    if keeper and not request.sampler_priority and (beside := samplers()[keeper].beside) is not None:
        order, replacing = [name for name in samplers() if name in beside], []
    for name in replacing:
        replaced = samplers()[name].replaces
        if replaced in order:
            order = [name if each == replaced else each for each in order if each != name]
    if request.temperature_last:
        last = [name for name in order if name == "temperature" or name in replacing]
        order = [name for name in order if name not in last] + last
    if keeper:
        order = [*(name for name in order if name != keeper), keeper]
    return order, tuple(warnings)


def _listed(asked: list[str] | str) -> list[str]:
    """The names in a list, in a text with lines or commas, or letter by letter."""
    if isinstance(asked, list):
        return asked
    asked = asked.strip()
    words = [word.strip() for word in asked.replace("\n", ",").replace(";", ",").split(",") if word.strip()]
    return [*asked] if len(words) == 1 and asked.lower() not in names() else words


def _last_tokens(texts: tuple[str, ...], tokenizer: TextTokenizer) -> list[float]:
    """The last token of each text behind a letter, since some tokenizers put a space before a text's first word."""
    found = [tokenizer.encode("a" + text, add_special_tokens=False)[-1] for text in texts]
    return [float(token) for token in dict.fromkeys(found)]
