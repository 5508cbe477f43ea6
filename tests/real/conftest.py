"""One server with the trained chat model for all tests that need one, and transformers' models of the same files."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers

from tests.e2e.servers import Server, serving
from tests.real.fetched import smollm2, the_file

Oracle = Callable[[Path], transformers.PreTrainedModel]

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "64", "--spare-worker")
"""Prompts are computed in small chunks; a dead worker has a successor at once."""


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """Transformers' model of a GGUF file, with its weights as fp32. Reading one takes it up to ten seconds."""
    transformers.utils.logging.disable_progress_bar()

    @cache
    def read(path: Path) -> transformers.PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        return model.eval()  # type: ignore[no-any-return]

    yield read
    read.cache_clear()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chat_server() -> AsyncIterator[Server]:
    """SmolLM2 in fp32: what one test kills is there again for the next."""
    async with serving(the_file(smollm2), *FLAGS, "--speculative-config", '{"method": "ngram"}') as server:
        yield server
