"""Filling in the middle: how a model is shown the text before and after a gap. The tokenizer's tokens tell the format.

    prefix first: BEGIN [files] PREFIX text before SUFFIX text after MIDDLE
    suffix first: BEGIN [files] SUFFIX text after PREFIX text before MIDDLE

The order is the one in which the model's authors write its prompts. Other files come first, in the way that
Qwen2.5-Coder was trained on (https://arxiv.org/abs/2409.12186): REPOSITORY name, then FILE name and text of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.frontend.text.tokenizer import TextTokenizer

JOINT = "\u263a"
"""Tokenized before a text that continues another one: no vocabulary joins this character with what follows."""


class Marks(NamedTuple):
    """The tokens of one format, as vocabularies write them."""

    models: str
    prefix: str
    suffix: str
    middle: str  # empty: the text before the gap comes last
    is_suffix_first: bool = False
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


FORMATS = (
    Marks(
        "Qwen2.5-Coder, CodeGemma", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        repository=("<|repo_name|>",), file=("<|file_sep|>", "<|file_separator|>"), ends=("<|fim_pad|>",),
    ),
    Marks(
        "StarCoder, StarCoder2, Granite Code", "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        repository=("<repo_name>", "<reponame>"), file=("<file_sep>", "<filename>"), ends=("<fim_pad>",),
    ),
    Marks("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    Marks("DeepSeek-Coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Marks("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    Marks("CodeLlama", "<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    Marks("Codestral", "[PREFIX]", "[SUFFIX]", "", is_suffix_first=True, ends=("[MIDDLE]",)),
    Marks("Seed-Coder", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),
    Marks("GLM-4.5", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    Marks("Falcon-H1", "<|prefix|>", "<|suffix|>", "<|middle|>"),
)  # fmt: skip

_TEXT_ENDS = ("<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")
"""Tokens that end a text; a chat model's generation defaults may name only others."""


class Chunk(NamedTuple):
    """The tokens of another file, or of a piece of one."""

    name: list[int]
    text: list[int]


@dataclass(frozen=True, slots=True)
class Infill:
    """One model's format, in token ids."""

    prefix: int
    suffix: int
    middle: int | None
    is_suffix_first: bool
    repository: int | None
    file: int | None
    begin: tuple[int, ...]  # what the tokenizer puts at the start of any text
    ends: tuple[int, ...]  # tokens that end the text in the gap, in addition to those that end all texts
    num_joint_tokens: int | None  # the tokens of `JOINT`; None: texts need none before them

    def prompt(
        self,
        before: list[int],
        after: list[int],
        chunks: Sequence[Chunk] = (),
        repository_name: Sequence[int] = (),
        file_name: Sequence[int] = (),
        *,
        begins: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's token ids.

        Args:
            before: the text before the gap.
            after: the text after it.
            chunks: other files, the nearest last.
            repository_name: written before the files, if the format has a mark for it.
            file_name: of the file with the gap; written if there are chunks.
            begins: whether to begin with the tokens that begin any text.
            max_tokens: limit; what is farthest from the gap is left out until the rest fits: first chunks, then the
                beginning of `before` and the end of `after`.
        """
        begin = [*self.begin] if begins else []
        marks = [self.prefix, self.suffix, *([] if self.middle is None else [self.middle])]
        if max_tokens is not None:
            room = max(max_tokens - len(begin) - len(marks), 0)
            if len(before) + len(after) > room:
                after = after[: max(room // 4, room - len(before))]
                before = before[max(len(before) - (room - len(after)), 0) :]
            max_tokens = room - len(before) - len(after)
        files = self._files(chunks, [*repository_name], [*file_name], max_tokens)
        middle = [] if self.middle is None else [self.middle]
        first, second = [self.prefix, *before], [self.suffix, *after]
        if self.is_suffix_first:
            first, second = second, first
        return [*begin, *files, *first, *second, *middle]

    def _files(
        self, chunks: Sequence[Chunk], repository_name: list[int], file_name: list[int], room: int | None
    ) -> list[int]:
        """The other files that fit, and the head of the file with the gap."""
        if not chunks:
            return []
        head = [] if self.repository is None else [self.repository, *repository_name]
        tail = [] if self.file is None else [self.file, *file_name]
        left = None if room is None else room - len(head) - len(tail)
        kept: list[list[int]] = []
        for name, text in reversed(chunks):
            written = [*([] if self.file is None else [self.file]), *name, *text]
            if left is not None and (left := left - len(written)) < 0:
                break
            kept.insert(0, written)
        return [*head, *(token_id for written in kept for token_id in written), *tail] if kept else []


def infill_of(tokenizer: TextTokenizer, config: Mapping[str, Any]) -> Infill | None:
    """The format of this tokenizer's model; None if it has none.

    `config` is tokenizer_config.json, which may name the tokens, as a GGUF file's metadata do.
    """
    named = [_text(config.get(f"{part}_token")) for part in ("prefix", "suffix", "middle")]
    found = next((marks for marks in FORMATS if marks.prefix == named[0]), None)
    if found is None and all(named):
        found = Marks("", named[0], named[1], named[2])
    known = (found, *FORMATS) if found is not None else FORMATS
    for marks in known:
        ids = [tokenizer.token_id(text) for text in (marks.prefix, marks.suffix, marks.middle) if text]
        if None not in ids:
            return _resolved(tokenizer, marks)
    return None


def _resolved(tokenizer: TextTokenizer, marks: Marks) -> Infill:
    def first(*texts: str) -> int | None:
        return next((token_id for text in texts if (token_id := tokenizer.token_id(text)) is not None), None)

    prefix, suffix, middle = (first(text) if text else None for text in (marks.prefix, marks.suffix, marks.middle))
    assert prefix is not None
    assert suffix is not None
    repository, file = first(*marks.repository), first(*marks.file)
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    ends = [prefix, suffix, middle, repository, file, *map(tokenizer.token_id, (*marks.ends, *_TEXT_ENDS))]
    joint = tokenizer.encode(JOINT, add_special_tokens=False)
    return Infill(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        is_suffix_first=marks.is_suffix_first,
        repository=repository,
        file=file,
        begin=tuple(whole[:at]),
        ends=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        num_joint_tokens=len(joint)
        if tokenizer.encode(f"{JOINT}a", add_special_tokens=False) != [*joint, *plain]
        else None,
    )


def _text(value: Any) -> str:
    """A token's text: written plainly, or as an object with its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
