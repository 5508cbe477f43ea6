"""Random encoders in the published layout, whose every weight matters, and what transformers makes of texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
_MODERN = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 12}
LONGEST = 120


class Case(NamedTuple):
    """An encoder to make."""

    model: str  # transformers' class
    config: str
    changes: dict[str, Any]
    has_types: bool = False


CASES = {
    "bert": Case("BertModel", "BertConfig", {}, True),
    "bert, relu": Case("BertModel", "BertConfig", {"max_position_embeddings": LONGEST, "hidden_act": "relu"}),
    "bert, classes": Case("BertForSequenceClassification", "BertConfig", {"num_labels": 3}, True),
    "bert, one class": Case("BertForSequenceClassification", "BertConfig", {"num_labels": 1}, True),
    "roberta": Case("RobertaModel", "RobertaConfig", {"pad_token_id": 1, "max_position_embeddings": LONGEST + 2}),
    "roberta, one class": Case("RobertaForSequenceClassification", "RobertaConfig", {"num_labels": 1}),
    "xlm-r, classes": Case(
        "XLMRobertaForSequenceClassification", "XLMRobertaConfig", {"num_labels": 4, "type_vocab_size": 1}
    ),
    "modernbert": Case("ModernBertModel", "ModernBertConfig", _MODERN),
    "modernbert, biases": Case(
        "ModernBertModel",
        "ModernBertConfig",
        {**_MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2},
    ),
    "modernbert, classes": Case(
        "ModernBertForSequenceClassification", "ModernBertConfig", {**_MODERN, "num_labels": 3}
    ),
    "modernbert, classes of means": Case(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_MODERN, "num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "nomic": Case("NomicBertModel", "NomicBertConfig", {}, True),
    "jina": Case("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", {"pad_token_id": 1}),
    "jina, classes": Case("JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", {"num_labels": 3}),
}


class Reference(NamedTuple):
    """A checkpoint and its model."""

    folder: Path
    model: Any
    case: Case

    @torch.inference_mode()
    def states(self, ids: Sequence[int], second_from: int = 0) -> Tensor:
        """[T, H] of one text, or of a pair whose second text begins there."""
        base = self.model.base_model
        states: Tensor = base(torch.tensor([ids]), **self._types(ids, second_from)).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], second_from: int = 0) -> Tensor:
        """[classes]"""
        logits: Tensor = self.model(torch.tensor([ids]), **self._types(ids, second_from)).logits[0]
        return logits

    def _types(self, ids: Sequence[int], second_from: int) -> dict[str, Tensor]:
        if not second_from:
            return {}
        return {"token_type_ids": (torch.arange(len(ids)) >= second_from).long()[None]}


def make(case: Case, folder: Path) -> Reference:
    """Make a checkpoint."""
    torch.manual_seed(7)
    config = getattr(transformers, case.config)(**{**SIZES, **case.changes})
    model = getattr(transformers, case.model)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(0.15 * torch.randn_like(weight) + is_scale)
    model.save_pretrained(folder)
    return Reference(folder, model, case)


def says(folder: Path, *modules: tuple[str, dict[str, Any]], **files: Any) -> None:
    """Write modules.json with the settings of each module, and other JSON files."""
    listed = []
    for number, (name, settings) in enumerate(modules):
        path = f"{number}_{name}" if number else ""
        listed.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        )
        (folder / path).mkdir(exist_ok=True)
        (folder / path / ("config.json" if number else "sentence_bert_config.json")).write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


WORDS = [f"w{i}" for i in range(SIZES["vocab_size"] - 6)]


def add_tokenizer(folder: Path, *, has_types: bool = True, pairs: str = "[CLS] $A [SEP] $B [SEP]") -> Tokenizer:
    """Words of their own, between marks as in BERT; `has_types`: the second text of a pair has another type."""
    specials = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "no", "yes"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(specials + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    second = pairs.replace("$B [SEP]", "$B:1 [SEP]:1") if has_types else pairs
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", second, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.add_special_tokens(specials[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return tokenizer
