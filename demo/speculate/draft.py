"""A small model of the same vocabulary, taught to say what the model says."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.demo.speculate.answers import Batch
from penstock.demo.speculate.target import Target


def draft_config(target: LlamaConfig, hidden_size: int, num_layers: int) -> LlamaConfig:
    """As the model, but thinner, and of fewer layers."""
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // (target.head_dim or 64),
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**target.to_dict(), **shape})


class DraftTraining:
    """A draft model that learns. See `Trainee`."""

    def __init__(
        self, target: Target, tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self._target = target
        self._tokenizer = tokenizer
        self.module = LlamaForCausalLM(draft_config(target.config, hidden_size, num_layers))
        self._begin_with_main_components()

    @torch.no_grad()
    def _begin_with_main_components(self) -> None:
        """Begin with the directions in which the model's embeddings differ most."""
        table = self._target.embedding
        own: Tensor = self.module.get_parameter("model.embed_tokens.weight")
        parts = torch.linalg.eigh(table.T @ table).eigenvectors  # of ascending size
        own.copy_(table @ parts[:, -own.shape[1] :])

    def loss(self, batch: Batch) -> Tensor:
        """How far the distributions of tokens of answers are from the model's."""
        chosen = batch.is_answer[:, 1:]
        logits: Tensor = self.module(input_ids=batch.token_ids, use_cache=False).logits
        shares = self._target.logits(batch.features[:, :-1][chosen].float()).float().softmax(-1)
        return cross_entropy(logits[:, :-1][chosen].float(), shares)

    @torch.no_grad()
    def guesses(self, batch: Batch, num_steps: int) -> Tensor:
        """See `Trainee`: they do not depend on the step."""
        found: Tensor = self.module(input_ids=batch.token_ids, use_cache=False).logits.argmax(-1)
        return pad(found[:, :-1], (1, 0)).expand(num_steps, -1, -1)

    def save(self, folder: Path) -> None:
        """Write the checkpoint with the tokenizer, as a model of its own."""
        torch.nn.Module.to(self.module, torch.bfloat16)
        self.module.config.dtype = torch.bfloat16
        self.module.generation_config = GenerationConfig.from_model_config(self.module.config)
        self.module.save_pretrained(folder)
        for name in ("is_local", "local_files_only"):
            self._tokenizer.init_kwargs.pop(name, None)
        self._tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(0o644)
