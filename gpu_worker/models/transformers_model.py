"""Models that run with `transformers`' own modelling code, with Penstock's pages behind its attention.

`transformers` lets a function replace every layer's attention. It passes queries, keys and values to this function
after all that the architecture does to them. The function here writes keys and values into the pages and attends over
them, for a whole ragged batch, which the model sees as one row of tokens with their own positions. Anything else that a
model keeps from token to token would be lost between two steps. Such models are refused, by their own description and
by a trial.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from penstock.config import ConfigError
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.out_of_memory import is_out_of_memory
from penstock.gpu_worker.models.attention import Attention, begin_attention
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import NO_EXPERTS, ForwardInputs, GroupInputs, Model, WholeStep
from penstock.gpu_worker.state.kv_pool import KVPool, LayerPages, PageGroup, page_groups
from penstock.models.description.model_config import KVShape
from penstock.models.files.source import LoadError
from penstock.models.parsing.by_transformers import TransformersConfig

_NAME = "penstock"
_TRIAL = (5, 7)  # tokens in two chunks, which must give the same result as one chunk
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.2  # of hidden states; for half dtypes, rounding may send a token to other experts


class _UnfitError(Exception):
    """A model cannot be served from pages; the message says why."""


class KeysValues(NamedTuple):
    """What one layer stores per token."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None


class Step(Protocol):
    """The attention of one forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: "Options") -> Tensor:
        """Store [T, Hk, D] keys and values, and attend: [T, Hq, D] -> [T, Hq, Dv]."""


class Options(NamedTuple):
    """Special features of a layer's attention."""

    window: int | None
    softcap: float
    sinks: Tensor | None


@dataclass
class LookingStep:
    """Records what each layer stores. A token attends only to itself."""

    found: dict[int, KeysValues] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: Options) -> Tensor:
        if layer in self.found:
            raise _UnfitError("a layer attends twice")
        self.found[layer] = KeysValues(k.shape[1], k.shape[2], v.shape[2], options.window)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class PagedStep:
    """Writes to the pages, and reads them."""

    def __init__(self, inputs: ForwardInputs, kv: KVPool) -> None:
        self._kv = kv
        self._attentions: dict[tuple[int, int, int], Attention] = {}  # by page group, key-value heads and their size
        self._inputs = [inputs.of_group(number) for number in range(len(kv.groups))]
        slots = [each.slot_mapping for each in self._inputs]
        self._places = [(slot // kv.page_size, slot % kv.page_size) for slot in slots]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: Options) -> Tensor:
        num_heads, value_dim = k.shape[1], v.shape[2]
        dim = max(k.shape[2], value_dim)
        q, k, v = (functional.pad(states, (0, dim - states.shape[2])) for states in (q, k, v))
        pages = self._pages_of(layer, num_heads, dim)
        page, offset = self._places[pages.group]
        pages.keys[page, :, offset] = k
        pages.values[page, :, offset] = v
        attended = self._attention(pages.group, num_heads, dim).attend(
            q.contiguous(), pages, scale=scale, window=options.window, softcap=options.softcap, sinks=options.sinks
        )
        return attended[..., :value_dim]

    def _pages_of(self, layer: int, num_heads: int, dim: int) -> LayerPages:
        """The layer's pages; if layers differ in size, smaller layers leave part of their pages empty."""
        size = num_heads * self._kv.page_size * dim
        pages = self._kv.layers[layer]
        keys, values = (
            part.flatten(1)[:, :size].unflatten(1, (num_heads, self._kv.page_size, dim))
            for part in (pages.keys, pages.values)
        )
        return LayerPages(keys, values, pages.group)

    def _attention(self, number: int, num_heads: int, dim: int) -> Attention:
        key = number, num_heads, dim
        if key not in self._attentions:
            group = PageGroup((), self._kv.page_size, num_heads, dim)
            self._attentions[key] = begin_attention(self._inputs[number], group)
        return self._attentions[key]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    penstock_step: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function as `transformers` calls it: [1, H, T, D] each -> [1, T, H, D], and no weights."""
    layer = getattr(module, "layer_idx", None)
    if penstock_step is None or layer is None or not getattr(module, "is_causal", True):
        raise _UnfitError("its attention is not that of a causal decoder")
    # Some modules state their window only by the mask, which is not used here.
    window = others["sliding_window"] if "sliding_window" in others else getattr(module, "sliding_window", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    options = Options(window, softcap or 0.0, sinks)
    return penstock_step.attend(int(layer), q, k, v, scale, options)[None], None


transformers.AttentionInterface.register(_NAME, _attention)
transformers.AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)  # positions decide, not masks


@dataclass
class _GivenOutput(ModelOutput):
    """The fields that heads read from their body's output."""

    last_hidden_state: Tensor | None = None
    past_key_values: object = None
    hidden_states: object = None
    attentions: object = None
    cross_attentions: object = None
    router_logits: object = None
    shared_kv_states: object = None


class _Given(nn.Module):
    """Replaces a model's body: returns the hidden states that it is given."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _GivenOutput:
        return _GivenOutput(last_hidden_state=inputs_embeds)


class TransformersModel:
    """See `Model`."""

    kernels = "transformers"
    held_experts = NO_EXPERTS
    is_batch_invariant = False
    can_be_captured = False

    def __init__(self, config: TransformersConfig, model: transformers.PreTrainedModel) -> None:
        """Find out what the model stores, and try it out.

        Raises:
            _UnfitError: the model keeps more than keys and values, or its attention cannot work on pages.
        """
        self._first_device, self._dtype = model.device, model.dtype
        body_name = _body_of(model)
        self._body = model.get_submodule(body_name)
        self._head = _with_submodule(model, body_name.split("."), _Given())
        looking = LookingStep()
        ids = torch.arange(3, 5, device=model.device) % config.vocab_size
        self._run(ids, torch.arange(2, device=model.device), looking)
        self.config = _with_layout(config, looking.found)
        self._try_out()

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        pass

    @property
    def enters_rows(self) -> bool:
        return False

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        pass

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        return None

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        return self._run(inputs.input_ids, inputs.positions, PagedStep(inputs, kv))

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V], with whatever the architecture does to its logits."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _run(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        output = self._body(
            input_ids=input_ids[None].long(), position_ids=positions[None], use_cache=False, penstock_step=step
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _try_out(self) -> None:
        """Check that two chunks give the same result as one, so that all state between tokens is in the pages."""
        groups, device = page_groups(self.config, sum(_TRIAL)), self._first_device
        ids = torch.arange(7, 7 + sum(_TRIAL), device=device) % self.config.vocab_size
        whole, chunked = (
            [
                self.forward(_one_row(ids, first, count, len(groups)), kv)
                for kv in [KVPool(groups, len(groups), self._dtype, device)]
                for first, count in chunks
            ]
            for chunks in ([(0, sum(_TRIAL))], [(0, _TRIAL[0]), (_TRIAL[0], _TRIAL[1])])
        )
        expected, got = torch.cat(whole).float(), torch.cat(chunked).float()
        error = float((got - expected).norm() / expected.norm())
        if not error <= (_TOLERANCE if self._dtype == torch.float32 else _HALF_TOLERANCE):
            raise _UnfitError("it keeps more from token to token than keys and values")


def build(config: TransformersConfig, reader: WeightReader) -> Model:
    """As `Family.build`.

    Raises:
        ConfigError: `transformers` cannot load the model, or it cannot be served from pages.
    """
    if reader.checkpoint is None:
        raise ConfigError(f"--load-format dummy makes no weights for {config.architecture}: transformers computes it")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            reader.checkpoint.path,
            dtype=reader.dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, TypeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise LoadError(f"transformers cannot load this {config.architecture}: {first[:300]}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise LoadError(f"the checkpoint lacks {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}")
    if model._is_stateful or not model._supports_attention_backend:
        raise _unfit(config, "transformers does not let others compute its attention")
    try:
        return TransformersModel(config, model.to(reader.device).eval())
    except (_UnfitError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        # An untried architecture may fail anywhere in the way it is called here.
        first = str(error).strip().partition("\n")[0]
        raise _unfit(config, f"transformers' code of it cannot work on pages ({first[:200]})") from error


def _unfit(config: TransformersConfig, why: str) -> ConfigError:
    return ConfigError(f"architecture {config.architecture} is not supported yet: {why}")


def _body_of(model: transformers.PreTrainedModel) -> str:
    """The name of the submodule that computes hidden states: the outermost one that the model calls for them."""
    found: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output, name=name: found.append(name) if hasattr(output, "last_hidden_state") else None
        )
        for name, module in model.named_modules()
        if name and name.count(".") <= 1
    ]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=ids, position_ids=ids, use_cache=False, penstock_step=LookingStep())
    for hook in hooks:
        hook.remove()
    if not found:
        raise _UnfitError("its body and head cannot be separated")
    return min(found, key=lambda name: name.count("."))


def _with_submodule(module: nn.Module, path: Sequence[str], other: nn.Module) -> nn.Module:
    """The same module, weights shared, with another submodule in one place."""
    changed = copy.copy(module)
    inner = other if len(path) == 1 else _with_submodule(module.get_submodule(path[0]), path[1:], other)
    changed._modules = {**module._modules, path[0]: inner}
    return changed


def _with_layout(config: TransformersConfig, kept: dict[int, KeysValues]) -> TransformersConfig:
    """Set what the layers store. If layers differ, each gets as much room as the largest."""
    if not kept:
        raise _UnfitError("it does not use transformers' attention functions")
    sizes = {(each.num_heads, max(each.key_dim, each.value_dim)) for each in kept.values()}
    num_heads, dim = sizes.pop() if len(sizes) == 1 else (1, max(heads * size for heads, size in sizes))
    windows = tuple(kept[layer].window if layer in kept else None for layer in range(max(kept) + 1))
    return replace(config, shapes=tuple(KVShape(num_heads, dim, dim, window) for window in windows))


def _one_row(ids: Tensor, first: int, count: int, num_groups: int) -> ForwardInputs:
    """Tokens [first, first + count) of a single sequence. In page group g it has page g, which holds all of it."""
    positions = torch.arange(first, first + count, device=ids.device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    return ForwardInputs(
        input_ids=ids[first : first + count],
        positions=positions,
        rows=int32(0),
        slot_mapping=positions,
        query_start_loc=int32(0, count),
        seq_lens=int32(first + count),
        page_table=int32(0)[None],
        max_query_len=count,
        max_seq_len=first + count,
        others=tuple(GroupInputs(positions + g * len(ids), int32(g)[None]) for g in range(1, num_groups)),
    )
