"""A family's random checkpoint in a quantized format, and what transformers makes of the same weights as floats."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import Answer, Reference, make_model
from tests.gpu_worker.formats.writers import Writer

_TOLERANCE = 2e-3
"""Of log-probabilities in fp32, as for the families."""

_OTHER_SUMS = (1e-6, -1e-6)
"""By how much inputs may be larger where they were summed up in another order: some steps of fp32."""


class QuantizedReference(Reference):
    """`folder` holds the quantized checkpoint. The reference computes with the floats that it stands for.

    Where inputs are rounded, the last bits of a sum may decide which way: then log-probabilities move by as much as
    rounding itself moves them, at that place and those after it. With two layers this is so at few places. If it is so
    early in a prompt, an answer agrees with inputs that are larger or smaller by some last bits.
    """

    def __init__(self, folder: Path, case: Case, writer: Writer) -> None:
        floats = folder / "floats"
        make_model(case).save_pretrained(floats)
        self.case, self.writer = case, writer
        self.kept, self.stored, plain = set[str](), dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in load_file(floats / "model.safetensors").items():
            if writer.quantizes(name):
                stored, plain[name] = writer.write(name, tensor)
                # A bias that the model has is its own.
                self.stored = stored | self.stored
            else:
                self.kept.add(name)
                plain[name] = self.stored[name] = tensor
        self.folder = folder / "quantized"
        shutil.copytree(floats, self.folder)
        save_file(self.stored, self.folder / "model.safetensors", {"format": "pt"})
        save_file(plain, floats / "model.safetensors", {"format": "pt"})
        config = json.loads((floats / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps(config | {"quantization_config": writer.config}))
        made = transformers.AutoModelForCausalLM.from_pretrained(
            floats, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        self.model = made.eval()
        self._known = {}
        self.first_answers: dict[tuple[int, ...], list[int]] | None = None
        """Of each prompt, where the others must be the same."""
        self.num_ranks = 1
        """Each rounds its own part of the inputs that are split."""

    def errors(self, prompt: list[int], answer: Answer) -> str:
        """As for floats, if inputs are not rounded.

        Else half of the places must be as near to the rounded reference, and the mean of all within a quarter of what
        rounding moves; to one of those whose inputs differ in the last bits.
        """
        if self.first_answers is not None:
            first = self.first_answers.setdefault(tuple(prompt), answer.tokens)
            if answer.tokens != first:
                return f"prompt of {len(prompt)}: {answer.tokens}, but before {first}"
        if self.writer.rounded is None:
            return super().errors(prompt, answer)
        found = self._rounding_errors(prompt, answer, 0.0)
        if found and any(not self._rounding_errors(prompt, answer, larger) for larger in _OTHER_SUMS):
            return ""
        return found

    def _rounding_errors(self, prompt: list[int], answer: Answer, larger: float) -> str:
        round_ = self.writer.rounded
        assert round_ is not None
        places = torch.arange(len(prompt) - 1, len(prompt) + len(answer.tokens) - 1)
        tokens = torch.tensor(answer.tokens)
        floats = self.logits(prompt + answer.tokens[:-1]).log_softmax(-1)
        scores = self.rounded_scores(prompt + answer.tokens[:-1], lambda x: round_(x * (1 + larger)))
        of_tokens = scores[places, tokens]
        # A token that is not the best one has been taken for one that is better by twice as much as scores are off.
        lost = (scores[places].amax(-1) - of_tokens) / 2
        errors = torch.maximum((of_tokens - torch.tensor(answer.logprobs)).abs(), lost)
        moved = (floats[places, tokens] - of_tokens).abs().mean()
        if errors.median() <= _TOLERANCE and errors.mean() <= _TOLERANCE + moved / 4:
            return ""
        found = f"{errors.median():.2g} off in the median, {errors.mean():.2g} in the mean"
        return f"prompt of {len(prompt)}: {found}, where rounding moves {moved:.2g}"

    def rounded_scores(self, text: list[int], rounded: Callable[[Tensor], Tensor]) -> Tensor:
        """Log-probabilities [tokens, vocabulary] where inputs of quantized weights are rounded."""
        # What latents are multiplied with becomes a part of other products, whose inputs are not rounded.
        # A checkpoint may have another name for the base model than its class (Nemotron-H: backbone).
        kept = {name.partition(".")[2] if ".layers." in name else name for name in self.kept}
        unrounded = {
            tensor.data_ptr()
            for name, tensor in self.model.named_parameters()
            if not kept.isdisjoint((name, name.partition(".")[2])) or name.endswith("kv_b_proj.weight")
        }
        split = {
            parameter.data_ptr()
            for name, parameter in self.model.named_parameters()
            if name.endswith(("o_proj.weight", "down_proj.weight"))
        }
        with _Rounding(rounded, unrounded, split, self.num_ranks):
            return self.logits(text).log_softmax(-1)


class _Rounding(TorchFunctionMode):
    """Rounds the inputs of products, but not of those with some weights; of those that are split, each rank's apart."""

    def __init__(
        self, rounded: Callable[[Tensor], Tensor], unrounded: set[int], split: set[int], num_ranks: int
    ) -> None:
        super().__init__()
        self.rounded, self.unrounded, self.split, self.num_ranks = rounded, unrounded, split, num_ranks

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is functional.linear and (weight := args[1].data_ptr()) not in self.unrounded:
            parts = args[0].chunk(self.num_ranks if weight in self.split else 1, dim=-1)
            args = (torch.cat([self.rounded(part) for part in parts], dim=-1), *args[1:])
        return func(*args, **(kwargs or {}))
