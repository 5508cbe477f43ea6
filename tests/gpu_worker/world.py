"""A random model with a tokenizer of one token per byte, and how grammars are read for it."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.ipc.messages import SamplingParams
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary
from penstock.parts.grammars.child.read import read_grammar
from tests.e2e.checkpoints import make_checkpoint

EOS = 2
PROMPT = [1, 50, 60, 70]


class World:
    """The model is written into a folder."""

    def __init__(self, folder: Path) -> None:
        make_checkpoint(folder)
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocabulary = grammar_vocabulary(open_checkpoint(folder))

    def params(self, kind: str, grammar: Any, **options: Any) -> SamplingParams:
        """Of a request for a text that matches a grammar."""
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        defaults: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.0, "stop_token_ids": (EOS,)}
        return SamplingParams(grammar=read_grammar(self.vocabulary, kind, text).text, **(defaults | options))

    def text(self, token_ids: list[int]) -> str:
        """The text of output tokens."""
        return self.tokenizer.decode(token_ids)
