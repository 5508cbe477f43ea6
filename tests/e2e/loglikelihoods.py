"""A small made-up task of loglikelihoods, and transformers' answers to it."""

from typing import Any, NamedTuple

import torch
import transformers

CONTEXTS = (
    "Question: what turns the turbine of a power station in the mountains?\nAnswer:",
    "Question: what stands between the reservoir and the penstock?\nAnswer:",
    "Water runs downhill because",
    "\u00c9t\u00e9 comme hiver, l'eau",
)
CHOICES = (" water", " a gate", " gravity pulls it", " coule \u2014 toujours", "\n")


class Likelihood(NamedTuple):
    """What lm-eval wants to know of a continuation."""

    logprob: float
    is_greedy: bool


def pairs() -> list[tuple[str, str]]:
    """Each context with each choice; contexts share their beginnings, so that a prefix cache has its chance."""
    return [(context, choice) for context in CONTEXTS for choice in CHOICES]


@torch.inference_mode()
def expected_likelihood(model: transformers.PreTrainedModel, context: list[int], choice: list[int]) -> Likelihood:
    """transformers' answer."""
    logits = model(torch.tensor([context + choice])).logits[0, len(context) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(choice)[:, None])
    return Likelihood(float(logprobs.sum()), logits.argmax(-1).tolist() == choice)


def payload(prompts: Any, seed: int = 1234) -> dict[str, Any]:
    """The request that lm-eval's `local-completions` sends for loglikelihoods."""
    return {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": seed,
        "echo": True,
    }


def parse(answer: dict[str, Any], context_lens: list[int]) -> list[Likelihood]:
    """How `local-completions` reads the answer: the last entry is the generated token's and is left out."""
    found = []
    for choice, context_len in zip(sorted(answer["choices"], key=lambda c: c["index"]), context_lens, strict=True):
        token_logprobs = choice["logprobs"]["token_logprobs"][context_len:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][context_len:-1]
        is_greedy = all(token == max(top.values()) for token, top in zip(token_logprobs, top_logprobs, strict=True))
        found.append(Likelihood(sum(token_logprobs), is_greedy))
    return found
