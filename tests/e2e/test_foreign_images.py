"""Towers that transformers computes, through real processes: its tokens, in chats of many turns."""

import inspect
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from penstock.models.finding.registry import open_checkpoint
from penstock.parts.images.child.foreign import ForeignProcessor
from penstock.parts.images.families import image_family_of
from tests.e2e.servers import serving
from tests.e2e.test_images import num_encoded, told
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import greedy_errors
from tests.gpu_worker.families.foreign_eyes import FOREIGN_EYES, write
from tests.parts.images.image_models import ImageModel, data_url, encoded, noise

PICTURES = [noise(30, 20, seed=1), noise(12, 44, seed=2)]
URLS = [data_url(encoded(picture)) for picture in PICTURES]


def said(turns: list[int | None]) -> list[dict[str, Any]]:
    """A chat in which some turns of the user show a picture."""
    messages: list[dict[str, Any]] = []
    for number, shown in enumerate(turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"Look, number {number}."}]
        if shown is not None:
            parts.insert(1, {"type": "image_url", "image_url": {"url": URLS[shown]}})
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "Fine, thank you."}]
    return messages[:-1]


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("more", [(), ("--tensor-parallel-size", "2")] if IS_SOAK else [()])
@pytest.mark.parametrize("name", ["internvl", "glm4v", "aya_vision", "lfm2_vl"] if IS_SOAK else ["internvl"])
async def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    eyes = FOREIGN_EYES[name]
    if eyes.needs_torchvision:
        pytest.importorskip("torchvision")
    if more and name == "lfm2_vl":
        pytest.skip("layers that keep a state are not split")
    folder = tmp_path / "m"
    model, token = write(folder, name)
    model.save_pretrained(folder)
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    template = ImageModel("", "", "", "", {}, (), eyes.mark, around=eyes.around).template
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": template}))
    checkpoint = open_checkpoint(folder)
    family = image_family_of(checkpoint)
    assert family is not None
    oracle: Any = ForeignProcessor(checkpoint, family)._processor
    flags = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "32", *more)
    async with serving(folder, *flags) as server, aiohttp.ClientSession() as http:
        async with http.get(f"{server.url}/v1/models") as answer:
            (card,) = (await answer.json())["data"]
        assert (card["input_modalities"], card["vision"], card["text_only"]) == (
            ["text", "image"], "transformers", None
        )  # fmt: skip
        chats: list[list[int | None]] = [[0], [None, 0, None], [None, 0, None, 1, 0]]
        for turns in chats:
            prompt, ids = await told(http, server, said(turns))
            shown = [PICTURES[turn] for turn in turns if turn is not None]
            others = oracle._process_images(shown, **ForeignProcessor(checkpoint, family)._arguments)[0]
            assert ids
            assert token in prompt
            assert greedy_errors(Seen(model, others, token), prompt, ids)[0] == []
        assert await num_encoded(http, server) == len(PICTURES)


class Seen:
    """A model of texts, to which these pictures belong."""

    def __init__(self, model: Any, made: Any, token: int) -> None:
        self._model, self._token = model, token
        known = inspect.signature(model.forward).parameters
        self._made = {name: torch.as_tensor(values) for name, values in made.items() if name in known}

    def __call__(self, ids: torch.Tensor) -> Any:
        types = {"mm_token_type_ids": (ids == self._token).long()} if "image_grid_thw" in self._made else {}
        return self._model(ids, **self._made, **types)
