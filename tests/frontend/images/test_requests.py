"""Images in requests of all APIs: what the engine is told, token counts, shared memory."""

import base64
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from penstock.ipc.messages import ImageRef
from penstock.ipc.shared_files import read, shared_folder
from penstock.parts.images.frontend.part import Images
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import get, post
from tests.frontend.images.conftest import RACCOON, ImageHost
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.responses.test_open_responses import ask
from tests.parts.distribution import hidden
from tests.parts.images.image_models import MODELS, data_url, encoded, noise

PICTURE = encoded(noise(120, 80))
URL = data_url(PICTURE)
NUM_TOKENS = 12  # of a picture of 120 x 80: 112 x 84 after resizing, 28 x 28 a token
PART = {"type": "image_url", "image_url": {"url": URL}}


def chat(live: LiveServer, *parts: Any, **fields: Any) -> Any:
    return post(live, "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}], **fields})


def pixels_of(image: ImageRef) -> np.ndarray:
    [tensor] = image.pixels.tensors
    content = read(image.pixels.segment, image.pixels.num_bytes)
    return np.frombuffer(content, tensor.dtype, offset=tensor.offset).reshape(tensor.shape)


def reader_of(live: LiveServer) -> Any:
    images = live.server.service.parts.get(Images)
    assert images is not None
    return images.reader


def test_what_the_engine_is_told(vision: LiveServer) -> None:
    seen: list[np.ndarray] = []

    def script(request: Any, index: int) -> Script:
        seen.extend(pixels_of(image) for image in request.images)
        return Script([5])

    vision.plays(script)
    other = data_url(encoded(noise(56, 200)))
    text = {"type": "text", "text": "Compare."}
    answer = chat(vision, PART, text, {"type": "image_url", "image_url": {"url": other}}, PART)
    assert answer.status == 200
    [request] = vision.scheduler.added
    first, second, third = request.images
    assert first.key == third.key != second.key
    assert first.pixels == third.pixels  # read once
    ids, pad = prompt_ids(request), vision.tokenizer.encode("<|image_pad|>", add_special_tokens=False)[0]
    assert [first.grid, second.grid] == [(1, 6, 8), (1, 14, 4)]
    for image in request.images:
        assert image.length == image.num_embeddings == np.prod(image.grid) // 4
        assert ids[image.start : image.start + image.length] == [pad] * image.length
        assert pad not in (ids[image.start - 1], ids[image.start + image.length])
    assert ids.count(pad) == sum(image.num_embeddings for image in request.images)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert [values.shape for values in seen] == [(48, 1176), (56, 1176), (48, 1176)]
    assert first.num_embeddings == NUM_TOKENS


def test_the_openai_clients_examples(vision: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The text of the client's own page, unchanged; its host's address is that of ours."""
    vision.says("A raccoon.")
    page = metadata.metadata("openai").json["description"]
    examples = re.findall(r"```python\n(.*?)```", str(page), re.DOTALL)
    by_url, by_data = (example for example in examples if "input_image" in example)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/image.png").write_bytes(PICTURE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{vision.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    fetched = []

    async def fetch(address: str) -> bytes:
        fetched.append(address)
        return PICTURE

    monkeypatch.setattr(reader_of(vision).fetcher, "fetch", fetch)
    with openai.OpenAI() as client:
        for example in (by_url, by_data):
            names: dict[str, Any] = {"client": client}
            code = compile(example, "example", "exec")
            exec(code, names)
            assert names["response"].output_text == "A raccoon."
            num_input = names["response"].usage.input_tokens
            assert num_input == len(prompt_ids(vision.scheduler.added[-1]))
            if names["client"] is not client:
                names["client"].close()
        answer = client.chat.completions.create(
            model="gpt-5.5",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is in this image?"},
                        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
                    ],
                }
            ],
        )
    assert answer.choices[0].message.content == "A raccoon."
    assert [RACCOON in address for address in fetched] == [True]
    assert {request.images[0].key for request in vision.scheduler.added} == {vision.scheduler.added[0].images[0].key}


def test_all_apis_make_the_same_prompt(vision: LiveServer) -> None:
    vision.says("Same.")
    data = base64.b64encode(PICTURE).decode()
    parts = [PART, {"type": "text", "text": "What?"}]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    items = [{"type": "input_image", "image_url": URL, "detail": "auto"}, {"type": "input_text", "text": "What?"}]
    said = {"role": "user", "content": "What?", "images": [data]}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": parts}]},
        "/v1/messages": {"model": "vision", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}]},
        "/v1/responses": {"input": [{"role": "user", "content": items}]},
        "/api/chat": {"model": "vision", "messages": [said], "stream": False},
        "/api/generate": {"model": "vision", "prompt": "What?", "images": [data], "stream": False},
    }
    for path, body in bodies.items():
        answer = post(vision, path, body)
        assert answer.status == 200, (path, answer.text)
    requests = vision.scheduler.added
    assert len(requests) == len(bodies)
    assert {(request.prompt_token_ids, request.images[0].key) for request in requests} == {
        (requests[0].prompt_token_ids, requests[0].images[0].key)
    }
    counted = post(
        vision, "/v1/messages/count_tokens", {"model": "vision", "messages": bodies["/v1/messages"]["messages"]}
    )
    assert counted.json()["input_tokens"] == len(prompt_ids(requests[0]))
    tokenized = post(vision, "/tokenize", bodies["/v1/chat/completions"])
    assert tokenized.json()["tokens"] == prompt_ids(requests[0])


def test_the_conformance_case_of_open_responses(vision: LiveServer) -> None:
    vision.says("A red circle.")
    parts = [{"type": "input_text", "text": "What do you see?"}, {"type": "input_image", "image_url": URL}]
    response = ask(vision, ("user", parts), model="vision")
    assert [item["type"] for item in response["output"]] == ["message"]
    assert len(vision.scheduler.added[0].images) == 1


def test_a_response_goes_on_with_its_image(vision: LiveServer) -> None:
    vision.says("A picture.")
    items = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL}]
    first = post(vision, "/v1/responses", {"input": [{"role": "user", "content": items}]}).json()
    answer = post(vision, "/v1/responses", {"input": "And?", "previous_response_id": first["id"]})
    assert answer.status == 200
    before, after = vision.scheduler.added
    assert before.images == after.images
    shown = get(vision, f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert shown[0]["content"][1]["image_url"] == URL


def test_images_of_results_and_low_detail(vision: LiveServer, host: ImageHost) -> None:
    vision.says("Seen.")
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    url = f"http://images.test:{host.port}/to/?where=/image.png"
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "image", "source": {"type": "url", "url": url}}],
    }
    turns = (("user", "Look."), ("assistant", [call]), ("user", [result]))
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = post(vision, "/v1/messages", {"model": "vision", "max_tokens": 9, "messages": messages})
    assert answer.status == 200, answer.text
    large = data_url(encoded(noise(700, 350)))
    for detail in ("low", "high"):
        assert chat(vision, {"type": "image_url", "image_url": {"url": large, "detail": detail}}).status == 200
    of_result, low, high = (request.images[0] for request in vision.scheduler.added)
    assert of_result.num_embeddings == NUM_TOKENS
    assert low.key != high.key
    assert chat(vision, {"type": "image_url", "image_url": {"url": large, "detail": "fine"}}).status == 400


def test_segments_live_as_long_as_requests_and_memory_is_bounded(vision: LiveServer) -> None:
    reader = reader_of(vision)
    vision.plays(lambda request, index: Script([5], hangs=True))
    vision.says("Done.")
    seen: set[Path] = set()
    for seed in range(60):  # each has 0.25 MiB of pixel values, of 128 MiB less twice an eighth
        assert (
            chat(vision, {"type": "image_url", "image_url": {"url": data_url(encoded(noise(150, 150, seed)))}}).status
            == 200
        )
        seen.add(shared_folder() / vision.scheduler.added[-1].images[0].pixels.segment)
        assert reader.num_bytes <= reader._max_total
    assert len(seen) == 60
    reader._max_total, before = reader._max_one + (1 << 20), reader._max_total
    try:
        assert (
            chat(vision, {"type": "image_url", "image_url": {"url": data_url(encoded(noise(150, 151)))}}).status == 200
        )
        assert sum(file.exists() for file in seen) <= 4  # the others made room
        reader._max_total = reader._max_one - 1
        answer = chat(vision, {"type": "image_url", "image_url": {"url": data_url(encoded(noise(150, 152)))}})
        assert answer.status == 429
        assert "--image-memory-gib" in answer.json()["error"]["message"]
    finally:
        reader._max_total = before


def test_16_bits_cmyk_and_transparency(vision: LiveServer) -> None:
    vision.says("Grey.")
    grey = np.full((64, 64), 0x8080, np.uint16)
    files = {
        "16 bits": encoded(Image.fromarray(grey)),
        "8 bits": encoded(Image.new("L", (64, 64), 0x80)),
        "CMYK": encoded(Image.new("CMYK", (64, 64), (0, 0, 0, 0x7F)), "JPEG", quality=100),
        "palette": encoded(Image.new("RGB", (64, 64), (0x80,) * 3).convert("P", palette=Image.Palette.ADAPTIVE)),
        "half a black over white": encoded(Image.new("RGBA", (64, 64), (0, 0, 0, 0x7F))),
        "half grey, half nothing": encoded(Image.new("LA", (64, 64), (0x80, 0xFF))),
        "GIF": encoded(Image.new("L", (64, 64), 0x80), "GIF"),
        "WebP": encoded(Image.new("RGB", (64, 64), (0x80,) * 3), "WEBP", lossless=True),
    }
    values: list[np.ndarray] = []

    def script(request: Any, index: int) -> Script:
        values.append(pixels_of(request.images[0]))
        return Script([5])

    vision.plays(script)
    for name, file in files.items():
        assert chat(vision, {"type": "image_url", "image_url": {"url": data_url(file)}}).status == 200, name
    for name, found in zip(files, values, strict=True):
        assert np.allclose(found, values[1], atol=0.05), name


def test_without_pillow_the_answer_says_what_to_install(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are answered."""
    (tmp_path / "without" / "PIL").mkdir(parents=True)
    (tmp_path / "without" / "PIL" / "__init__.py").write_text("raise ModuleNotFoundError(name='PIL')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "without"))
    with live_server(MODELS["qwen2-vl"].write(tmp_path / "model"), sockets, takes_images=True) as live:
        refused = chat(live, PART)
        assert refused.status == 400, refused.text
        assert "images need the Python package PIL: pip install 'penstock-llm[images]'" in refused.text
        assert chat(live, {"type": "text", "text": "Hello"}).status == 200


def test_without_the_part_images_are_refused(tmp_path: Path, sockets: Path) -> None:
    with (
        hidden("images"),
        live_server(MODELS["qwen2-vl"].write(tmp_path / "model"), sockets, takes_images=True) as live,
    ):
        refused = chat(live, PART)
        assert (refused.status, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert "accepts only parts of type 'text'" in refused.text
        assert chat(live, {"type": "text", "text": "Hello"}).status == 200
        assert get(live, "/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_the_model_is_said_to_take_images(vision: LiveServer, live: LiveServer) -> None:
    assert get(vision, "/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    assert "vision" in post(vision, "/api/show", {"model": "vision"}).json()["capabilities"]
    assert get(vision, "/v1/models", **{"anthropic-version": "2023-06-01"}).status == 200
    assert get(live, "/v1/models").json()["data"][0]["input_modalities"] == ["text"]
    answer = chat(live, PART)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
