"""A model that says what a script tells it to, chosen by the conversation: real servers answer what a test wants.

The checkpoint's folder holds `script.json`:

    {"openers": ["<|im_start|>assistant\\n"],        after the last of these begins the answer
     "rules": [{"after": "Weather?", "seen": [], "say": "It rains."}]}

The rule is taken whose `after` ends last in the prompt; of several, the one with the most `seen`, all of which must
stand there too. What `say` says is drawn token by token, special tokens included, and then the end of the turn. A
grammar's mask is applied as to any model: a token that it forbids is not drawn; blanks may be left out in this way,
and after anything else that the script does not know the turn ends as soon as the grammar lets it.
"""

import json
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.models.files.source import Checkpoint
from tests.clockwork.family import ClockworkConfig
from tests.clockwork.model import ClockworkModel

_BLANKS = " \n\t"
_CLOSING = '"}]'
_FIRST, _SECOND, _END, _CLOSE = 4000.0, 3000.0, 2000.0, 1000.0  # so far apart that no temperature draws anything else


class Rule(NamedTuple):
    """Texts as tokens: a character for each id."""

    after: str
    seen: tuple[str, ...]
    say: str


class ScriptedModel(ClockworkModel):
    """As the clockwork model reads its tokens back from the pages, so this one does."""

    def __init__(self, checkpoint: Checkpoint, config: ClockworkConfig) -> None:
        """Read the script."""
        super().__init__(config)
        tokenizer = Tokenizer.from_buffer(checkpoint.tokenizer())
        self._end = int(checkpoint.config["eos_token_id"])
        script = json.loads((checkpoint.path / "script.json").read_text())

        def spelled(text: str) -> str:
            return "".join(map(chr, tokenizer.encode(text, add_special_tokens=False).ids))

        self._openers = [spelled(text) for text in script["openers"]]
        self._closing = [ord(spelled(text)) for text in _CLOSING]
        self._blanks = frozenset(spelled(blank) for blank in _BLANKS)
        self._rules = [
            Rule(spelled(rule["after"]), tuple(map(spelled, rule.get("seen", []))), spelled(rule["say"]))
            for rule in script["rules"]
        ]

    def summary(self, tokens: npt.NDArray[np.int32]) -> int:
        """The token that comes next, and the one to take where the first is forbidden."""
        text = "".join(map(chr, tokens.tolist()))
        start = max((text.rfind(opener) + len(opener) for opener in self._openers if opener in text), default=len(text))
        prompt, said = text[:start], text[start:]
        say = max(
            (
                (prompt.rfind(rule.after) + len(rule.after), len(rule.seen), rule.say)
                for rule in self._rules
                if _fits(rule, prompt)
            ),
            default=(0, 0, ""),
        )[2]
        first, second = self._next(say + chr(self._end), said)
        return first * self.config.vocab_size + second

    def _next(self, say: str, said: str) -> tuple[int, int]:
        at = 0
        for token in said:
            while at < len(say) and say[at] != token and say[at] in self._blanks:
                at += 1
            if at == len(say) or say[at] != token:
                return self._end, self._end
            at += 1
        rest = say[at:] or chr(self._end)
        return ord(rest[0]), ord(next((token for token in rest if token not in self._blanks), rest[0]))

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, 1] of the rows that sample -> [S, V]."""
        chosen = hidden[:, 0].long()
        scores = torch.zeros(len(chosen), self.config.vocab_size)
        rows = torch.arange(len(chosen))
        scores[:, self._closing] = _CLOSE
        scores[:, self._end] = _END
        scores[rows, chosen % self.config.vocab_size] = _SECOND
        scores[rows, chosen // self.config.vocab_size] = _FIRST
        return scores


def _fits(rule: Rule, prompt: str) -> bool:
    return rule.after in prompt and all(text in prompt for text in rule.seen)
