"""Vision towers that `transformers`' own code computes.

The whole model is built on the meta device, and then everything of its decoder is left out. In the decoder's place is a
module that keeps what it is given. So the model's own code puts a picture's embeddings into the places of a prompt of
image tokens, with all that it does to them, and what it puts there is kept.

That code cannot pause, so it runs in a thread, which the worker lets go on and stops again: only one of the two runs at
any time.
"""

import inspect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from penstock.gpu_worker.devices.out_of_memory import is_out_of_memory
from penstock.models.files.source import Checkpoint, LoadError
from penstock.models.vision.foreign import ForeignVision

_PART_SECONDS = 0.0005
"""A part of the work is over when a module returns after this time."""

_OWN_INPUTS = ("input_ids", "position_ids", "use_cache")


class _StoppedError(BaseException):
    """Nobody wants the picture any more. Not an `Exception`, so that nothing between here and there catches it."""


@dataclass
class _Output(ModelOutput):
    """The fields that models read from their decoder's output."""

    last_hidden_state: Tensor | None = None
    past_key_values: object = None
    hidden_states: object = None
    attentions: object = None
    logits: Tensor | None = None
    router_logits: object = None
    shared_kv_states: object = None


class _NoTokens(nn.Module):
    """In place of the token embeddings: no numbers, so that one sees where an image's have not come."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.none = torch.full((size,), torch.nan)

    @property
    def weight(self) -> Tensor:
        """[1, H], for whatever row is asked for."""
        return self.none[None]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.none.repeat(*input_ids.shape, 1)  # not a view: some models write into it


class _NoDecoder(nn.Module):
    """In place of the decoder: keeps its input."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _NoTokens(config.hidden_size)
        self.kept: tuple[Tensor, list[Tensor]] | None = None

    def get_input_embeddings(self) -> nn.Module:
        """As in all models of `transformers`."""
        return self.embed_tokens

    def get_per_layer_inputs(self, *args: object) -> None:
        """Gemma's vectors for each layer, which tokens alone have."""

    def forward(self, *args: object, inputs_embeds: Tensor, **others: Any) -> _Output:
        self.kept = inputs_embeds, others.get("deepstack_visual_embeds") or []
        return _Output(last_hidden_state=inputs_embeds, logits=inputs_embeds)


class ForeignTower:
    """See `Tower`."""

    def __init__(self, vision: ForeignVision, model: nn.Module, decoder: _NoDecoder, device: torch.device) -> None:
        """`model`: the whole one, with `decoder` in the place of its own."""
        self.vision, self.device = vision, device
        self._model, self._decoder = model, decoder
        self._known = frozenset(inspect.signature(model.forward).parameters)
        self._dtype = next((its.dtype for its in model.parameters() if its.is_floating_point()), torch.float32)
        decoder.embed_tokens.none = torch.full((vision.out_size,), torch.nan, dtype=self._dtype, device=device)
        self._turn: _Turn | None = None  # of the picture that is computed at the moment
        for module in model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._pause)

    @property
    def embedding_bytes(self) -> int:
        return self.vision.width * self._dtype.itemsize

    def encode(self, pixels: Mapping[str, Tensor], grid: Sequence[int]) -> Iterator[Tensor | None]:
        """`pixels`: all that the processor made of a picture."""
        turn = _Turn(lambda: self._computed(pixels, self.vision.num_embeddings(tuple(grid))), self.device)
        try:
            while True:
                self._turn = turn
                made = turn.go_on()
                yield made
                if made is not None:
                    return
        finally:
            turn.stop()
            self._turn = None

    def _computed(self, pixels: Mapping[str, Tensor], num_embeddings: int) -> Tensor:
        """[embeddings, width]"""
        ids = pixels.get("input_ids", torch.full((1, num_embeddings), self.vision.image_token))
        inputs: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "position_ids": torch.arange(num_embeddings, device=self.device)[None],
            "use_cache": False,
        }
        inputs |= {name: self._given(values) for name, values in pixels.items() if name not in _OWN_INPUTS}
        self._model(**{name: value for name, value in inputs.items() if name in self._known})
        kept, self._decoder.kept = self._decoder.kept, None
        made = None if kept is None else torch.cat([kept[0][0] * self.vision.scale, *kept[1]], dim=1)
        if made is None or made.shape != (num_embeddings, self.vision.width) or made.isnan().all(dim=1).any():
            raise ValueError("the vision tower makes other embeddings of the image than its processor says")
        return made

    def _given(self, values: Tensor) -> Tensor:
        return values.to(self.device, self._dtype) if values.is_floating_point() else values.to(self.device)

    def _pause(self, *args: object) -> None:
        if self._turn is not None:
            self._turn.pause()


class _Turn:
    """A computation in a thread of its own that runs only while `go_on` waits for it."""

    def __init__(self, compute: Any, device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._is_over = self._is_stopped = False
        self._made: Tensor | None = None
        self._error: BaseException | None = None

    def go_on(self) -> Tensor | None:
        """Compute a part.

        Returns:
            The result once it is there.

        Raises:
            ValueError: the model does not take such a picture.
        """
        if self._thread is None:
            self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            self._thread = threading.Thread(target=self._run, name="tower", daemon=True)
            self._thread.start()
        self._began = time.perf_counter()
        self._may_run.release()
        self._has_paused.acquire()
        error = self._error
        if error is None:
            return self._made
        if is_out_of_memory(error) or not isinstance(error, ValueError | RuntimeError | IndexError | TypeError):
            raise error
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"the model's vision tower does not take the image: {said[:200]}") from error

    def pause(self) -> None:
        """Wait for the next `go_on` if the part has taken long enough; called in the thread."""
        if threading.current_thread() is not self._thread or time.perf_counter() - self._began < _PART_SECONDS:
            return
        self._has_paused.release()
        self._wait()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None and not self._is_over:
            self._is_stopped = True
            self._may_run.release()
            self._thread.join()

    def _wait(self) -> None:
        self._may_run.acquire()
        if self._is_stopped:
            raise _StoppedError

    def _run(self) -> None:
        try:
            self._wait()
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._made = self._compute()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._has_paused.release()


def foreign_tower(
    vision: ForeignVision, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> ForeignTower:
    """Build the tower, with the checkpoint's weights; without a checkpoint, with random ones.

    Raises:
        LoadError: `transformers` cannot load it, or the checkpoint lacks some of its weights.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made: Any = _without_decoder(getattr(transformers, vision.architecture))
    assert checkpoint is not None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
        config.__dict__.pop("quantization_config", None)  # of the decoder; what the tower has, must be floats
        model, info = made.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, TypeError, ImportError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise LoadError(f"transformers cannot load the vision tower of {vision.architecture}: {first[:300]}") from error
    if missing := sorted(info["missing_keys"]):
        raise LoadError(f"the checkpoint lacks {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}")
    model = model.to(device).eval()
    decoder = next(module for module in model.modules() if isinstance(module, _NoDecoder))
    return ForeignTower(vision, model, decoder, device)


def _without_decoder(architecture: Any) -> Any:
    """A subclass of a model's class: without its decoder, its token embeddings and its head."""

    class WithoutDecoder(architecture):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **others: Any) -> None:
            super().__init__(config, *args, **others)
            head, decoder = self.get_output_embeddings(), self.get_decoder()
            tokens = self.get_input_embeddings()
            names = {module: name for name, module in self.named_modules()}
            stand_in = _NoDecoder(config.get_text_config())
            if tokens is not None and not names[tokens].startswith(f"{names[decoder]}."):
                self.set_submodule(names[tokens], stand_in.embed_tokens)
            if head is not None:
                self.set_submodule(names[head], nn.Identity())
            self.set_submodule(names[decoder], stand_in)
            self.all_tied_weights_keys: dict[str, str] = {}

        def tie_weights(self, *args: Any, **others: Any) -> None:
            """Nothing is left that is tied."""

    # By its name and module, transformers knows how the names of weights have changed since the first release.
    WithoutDecoder.__name__, WithoutDecoder.__module__ = architecture.__name__, architecture.__module__
    return WithoutDecoder
