"""What the model answers to questions of its own kind, as batches of token ids."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from penstock import LLM, SamplingParams
from penstock.demo.chatml import ChatMessage, pieces
from penstock.demo.corpus import conversations
from penstock.demo.evaluate import MAX_NEW_TOKENS
from penstock.demo.held_out import held_out_conversations
from penstock.demo.speculate.target import Target


class Text(NamedTuple):
    """A conversation of T tokens whose last answer is the model's."""

    token_ids: list[int]
    is_answer: list[bool]  # whether a token is of an answer


class Batch(NamedTuple):
    """Conversations of about one length, filled up on the right."""

    token_ids: Tensor  # int64[B, T]
    is_answer: Tensor  # bool[B, T]
    features: Tensor  # bf16[B, T, H], the model's

    @classmethod
    def of(cls, texts: list[Text], target: Target) -> Self:
        """Put conversations side by side."""
        token_ids = pad_sequence([torch.tensor(text.token_ids) for text in texts], batch_first=True)
        is_answer = pad_sequence([torch.tensor(text.is_answer) for text in texts], batch_first=True)
        return cls(token_ids, is_answer, target.features(token_ids).to(torch.bfloat16))


def training_texts(model: Path, tokenizer: PreTrainedTokenizerFast, seed: int, count: int, threads: int) -> list[Text]:
    """Conversations with questions that the model was trained on."""
    return _answered(model, tokenizer, islice(conversations(seed), count), threads)


def held_out_texts(model: Path, tokenizer: PreTrainedTokenizerFast, seed: int, count: int, threads: int) -> list[Text]:
    """Conversations with questions that neither the model nor a drafter has seen."""
    return _answered(model, tokenizer, islice(held_out_conversations(seed, most_turns=2), count), threads)


def _answered(
    model: Path, tokenizer: PreTrainedTokenizerFast, chats: Iterable[list[ChatMessage]], threads: int
) -> list[Text]:
    """The conversations with the model's greedy answer, token by token, in place of the last one."""
    asked = [_encoded(tokenizer, chat[:-1]) for chat in chats]
    start = tokenizer.encode("<|im_start|>assistant\n")
    prompts = [[*text.token_ids, *start] for text in asked]
    with LLM(model, num_threads=threads, max_num_seqs=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, min_p=0.0))
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    end = tokenizer.eos_token_id
    found = []
    for text, answer in zip(asked, answers, strict=True):
        answer = answer if answer[-1] == end else [*answer, end]
        found.append(
            Text([*text.token_ids, *start, *answer], [*text.is_answer, *[False] * len(start), *[True] * len(answer)])
        )
    return found


def frequent_tokens(texts: list[Text], count: int) -> list[int]:
    """The most frequent tokens of answers, ascending: a head that guesses these only reads less of an output matrix."""
    seen = Counter(
        token for text in texts for token, is_its in zip(text.token_ids, text.is_answer, strict=True) if is_its
    )
    return sorted(token for token, _ in seen.most_common(count))


def _encoded(tokenizer: PreTrainedTokenizerFast, messages: list[ChatMessage]) -> Text:
    token_ids: list[int] = []
    is_answer: list[bool] = []
    for text, is_learned in pieces(messages):
        ids = tokenizer.encode(text)
        token_ids += ids
        is_answer += [is_learned] * len(ids)
    return Text(token_ids, is_answer)


def batches(texts: list[Text], num_tokens: int, target: Target, seed: int) -> Iterator[Batch]:
    """Endless batches of about `num_tokens` tokens, in an order that the seed says; each round has every text once."""
    rng = random.Random(seed)
    groups: list[list[Text]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.token_ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(text.token_ids) > num_tokens:
            groups.append([])
        groups[-1].append(text)
    made: dict[int, Batch] = {}  # features take most of the time: they are computed once
    order = list(range(len(groups)))
    while True:
        rng.shuffle(order)
        for number in order:
            if number not in made:
                made[number] = Batch.of(groups[number], target)
            yield made[number]
