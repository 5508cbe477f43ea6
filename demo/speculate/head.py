"""An EAGLE head for the model (Li et al., 2024, arXiv 2401.15077), and its training.

At position i the head gets the model's features there and token i + 1, and makes of them what the features at i + 1
will be, from which the model's output matrix guesses token i + 2. For the guesses after it, it gets its own features.
Training does the same for several steps, so that the head learns to work with its own mistakes (Zhang et al., 2024,
arXiv 2408.15766): step s takes what step s - 1 has made, one position later, and attends to what was known then.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, pad, smooth_l1_loss
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from penstock.demo.speculate.answers import Batch
from penstock.demo.speculate.target import Target

NUM_STEPS = 3
"""Guesses in a row that training unrolls."""
_FEATURE_WEIGHT = 0.2  # of the loss on features, beside that on tokens

KV = tuple[Tensor, Tensor]  # keys and values of all positions, [B, heads, T, D]


class Attention(nn.Module):
    """Attention as in Llama, over the positions of several steps."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or 1
        hidden, self.head_dim = config.hidden_size, config.head_dim or 64
        self.group = num_heads // num_kv_heads
        self.q_proj = nn.Linear(hidden, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, rotations: KV, before: list[KV]) -> Tensor:
        """[B, T, H] -> [B, T, H]; appends this step's keys and values to those of the steps `before`.

        In step s position i sees the first step's positions up to i - s, and of step m that at i - s + m.
        """
        num_rows, num_tokens, _ = x.shape
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(num_rows, num_tokens, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *rotations)
        before.append((k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)))
        step = len(before) - 1
        (first_k, first_v), later = before[0], before[1:]
        hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1 - step)
        scores = [(q @ first_k.mT).masked_fill(hidden, float("-inf"))]
        scores += [(q * delayed(k, step - m)).sum(-1, keepdim=True) for m, (k, _) in enumerate(later, 1)]
        shares = (torch.cat(scores, -1).float() * self.head_dim**-0.5).softmax(-1).to(v.dtype)
        mixed = shares[..., :num_tokens] @ first_v
        for m, (_, v) in enumerate(later, 1):
            mixed = mixed + shares[..., num_tokens + m - 1, None] * delayed(v, step - m)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A layer without a norm before its attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rotations: KV, before: list[KV]) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.self_attn(x, rotations, before)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """See the module. Its tensors have the names of the published layout."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.rope = LlamaRotaryEmbedding(config)

    def unrolled(self, embedded: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """The features of the next positions, as each of the steps makes them.

        Args:
            embedded: [B, T, H], of the next tokens.
            features: [B, T, H], the model's.
            num_steps: how many.

        Returns:
            [B, T, H] for each step s, whose first s positions mean nothing.
        """
        rotations = self.rope(features, torch.arange(features.shape[1])[None])
        before: list[KV] = []
        made: list[Tensor] = []
        for _ in range(num_steps):
            x = self.fc(torch.cat((embedded, features), -1))
            made.append(self.layers[0](x, rotations, before))
            features = delayed(made[-1], 1)
        return made


def delayed(x: Tensor, by: int) -> Tensor:
    """[..., T, D] with each position's where the position `by` later was; zeros come in."""
    return x if by == 0 else pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def head_config(target: LlamaConfig, intermediate_size: int) -> LlamaConfig:
    """As the model, with one layer."""
    config = LlamaConfig(**{**target.to_dict(), "num_hidden_layers": 1, "intermediate_size": intermediate_size})
    config.architectures = ["LlamaForCausalLM"]
    return config


class HeadTraining:
    """A head that learns."""

    def __init__(self, target: Target, intermediate_size: int, token_ids: list[int], seed: int) -> None:
        """`token_ids`: those that it guesses, ascending."""
        torch.manual_seed(seed)
        self._target = target
        self._token_ids = torch.tensor(token_ids)
        self.module = Head(head_config(target.config, intermediate_size))
        self._even_out()

    @torch.no_grad()
    def _even_out(self) -> None:
        """Let embeddings and features, whose sizes differ much, count alike at first."""
        hidden = self.module.config.hidden_size
        for part, size in zip(
            self.module.fc.weight.split(hidden, 1),
            (self._target.embedding.std(), self._target.norm.mean()),
            strict=True,
        ):
            part.normal_(std=float((2 * hidden) ** -0.5 / size))

    def _made(self, batch: Batch, num_steps: int) -> list[Tensor]:
        embedded = embedding(batch.token_ids[:, 1:-1], self._target.embedding)
        return self.module.unrolled(embedded, batch.features[:, :-2].float(), num_steps)

    def loss(self, batch: Batch) -> Tensor:
        """How far the features for tokens of answers are from the model's, and their tokens' distributions."""
        total = torch.zeros(())
        for step, made in enumerate(self._made(batch, NUM_STEPS)):
            chosen = batch.is_answer[:, 2:].clone()
            chosen[:, :step] = False
            its, wanted = made[chosen].float(), batch.features[:, 1:-1][chosen].float()
            shares = self._target.logits(wanted).float().softmax(-1)
            total = total + cross_entropy(self._target.logits(its).float(), shares)
            total = total + _FEATURE_WEIGHT * smooth_l1_loss(its, wanted)
        return total / NUM_STEPS

    @torch.no_grad()
    def guesses(self, batch: Batch, num_steps: int) -> Tensor:
        """See `Trainee`."""
        made = torch.stack(self._made(batch, num_steps))
        best = self._target.logits(made)[..., self._token_ids].argmax(-1)
        return pad(self._token_ids[best], (2, 0))

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        self.module.config.save_pretrained(folder)
        tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in self.module.state_dict().items()}
        tensors["d2t"] = (self._token_ids - torch.arange(len(self._token_ids))).to(torch.int32)
        save_file(tensors, folder / "model.safetensors")
