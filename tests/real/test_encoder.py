"""A real encoder, all-MiniLM-L6-v2: vectors and similarities are those of sentence-transformers, on both kernels."""

import numpy as np
import pytest

from penstock import LLM
from tests.real.fetched import minilm, only_real, the_file

pytestmark = only_real

TEXTS = [
    "How do I cook rice?",
    "Rinse it, add twice as much water, and let it simmer under a lid.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Ein Mann isst etwas Brot — naïve café, 東京 🙂",
    "x",
    "word " * 400,
]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_similarities(kernels: str) -> None:
    import sentence_transformers  # takes seconds

    folder = the_file(minilm)
    right = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with LLM(folder, device="cpu", dtype="float32", cpu_kernels=kernels) as llm:
        outputs = llm.embed(TEXTS * 8, truncate_prompt_tokens=-1, use_tqdm=False)
        found = np.array([output.outputs.embedding for output in outputs])
        assert len(outputs[-1].prompt_token_ids) == 256
        [score] = llm.score(TEXTS[2], TEXTS[3], use_tqdm=False)
    assert np.abs(found - np.tile(right, (8, 1))).max() < 1e-5
    assert np.abs(found[:8] @ found[:8].T - right @ right.T).max() < 1e-5
    assert score.outputs.score == pytest.approx(float(right[2] @ right[3]), abs=1e-5)
