"""Models that see, but are served as text only: `/v1/models` and refusals say why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.parts.images.options import ImageOptions
from tests.frontend.http_client import get, post
from tests.frontend.live_server import live_server
from tests.parts.images.image_models import MODELS, data_url, encoded, noise

_URL = data_url(encoded(noise(8, 8)))
_SOURCE = {"type": "base64", "media_type": "image/png", "data": _URL.partition(",")[2]}
_WHY = "this model is served as text only, because what its processor writes for an image depends on the text around it"


def _said(part: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [part]}], **more}


def test_every_api_says_why(tmp_path: Path, sockets: Path) -> None:
    folder = replace(MODELS["llava"], architecture="Idefics2ForConditionalGeneration", text_type="mistral").write(
        tmp_path / "m"
    )
    with live_server(folder, sockets, takes_images=False, names=("m",)) as live:
        card = get(live, "/v1/models").json()["data"][0]
        assert (card["input_modalities"], card.get("vision")) == (["text"], None)
        assert card["text_only"] in _WHY
        bodies = {
            "/v1/chat/completions": _said({"type": "image_url", "image_url": {"url": _URL}}),
            "/v1/messages": _said({"type": "image", "source": _SOURCE}),
            "/v1/responses": {
                "model": "m",
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": _URL}]}],
            },
        }
        for path, body in bodies.items():
            answer = post(live, path, body)
            assert answer.status == 400, path
            assert _WHY in answer.text, path
        assert post(live, "/v1/chat/completions", _said({"type": "text", "text": "Hello"})).status == 200


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, ImageOptions(max_images=0), "the server was started with --max-images 0"),
        (
            {"processor": "PPChart2TableProcessor"},
            ImageOptions(),
            "its processor writes no places for images into prompts",
        ),
    ],
)
def test_other_reasons(tmp_path: Path, sockets: Path, changes: dict[str, Any], options: ImageOptions, why: str) -> None:
    model = replace(MODELS["llava"], architecture="GotOcr2ForConditionalGeneration", text_type="qwen2", **changes)
    with live_server(model.write(tmp_path / "m"), sockets, parts=[options], takes_images=True) as live:
        card = get(live, "/v1/models").json()["data"][0]
        assert (card["input_modalities"], card["text_only"]) == (["text"], why)


def test_a_model_of_texts_has_nothing_to_say(tmp_path: Path, sockets: Path) -> None:
    with live_server(MODELS["llava"].write(tmp_path / "m"), sockets, takes_images=True) as live:
        card = get(live, "/v1/models").json()["data"][0]
        assert (card["input_modalities"], card["vision"], card.get("text_only")) == (["text", "image"], "own", None)
