"""Images through real processes: transformers' tokens, encoded once, whatever dies."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import torch
import transformers

from penstock import LLM, SamplingParams
from penstock.ipc.curve import make_key_file
from penstock.parts.recording.lines import Encoded
from penstock.parts.recording.reader import Recording
from tests.e2e.servers import Server, serving, stream
from tests.e2e.test_tcp import free_port
from tests.faults.soak import sized
from tests.faults.test_engines import until_both_are_ready
from tests.parts.images.image_models import MODELS, data_url, encoded, noise
from tests.python_api.conftest import SMALL

LENGTH = 40
FAMILY = MODELS["qwen2.5-vl"]
PICTURES = [noise(90, 60, seed=1), noise(60, 120, seed=2)]
URLS = [data_url(encoded(picture)) for picture in PICTURES]


class Seeing(NamedTuple):
    """A checkpoint that takes images, and transformers' model of it."""

    folder: Path
    model: Any

    def expected(self, prompt: list[int], pictures: list[Any]) -> list[int]:
        """The likeliest token after the prompt and all before it, again and again."""
        made = FAMILY.make_image_processor()(pictures, return_tensors="pt")
        token, ids = self.model.config.image_token_id, prompt[:]
        with torch.inference_mode():
            for _ in range(LENGTH):
                logits = self.model(
                    torch.tensor([ids]),
                    pixel_values=made["pixel_values"],
                    image_grid_thw=made["image_grid_thw"],
                    mm_token_type_ids=torch.tensor([[int(each == token) for each in ids]]),
                ).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = FAMILY.write(tmp_path_factory.mktemp("images"))
    tokenizer = FAMILY.tokenizer()
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,
        "vocab_size": len(tokenizer),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    vision: dict[str, Any] = {
        "depth": 3, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
        "fullatt_block_indexes": [1], "initializer_range": 0.12,
    }  # fmt: skip
    make: Any = transformers.CONFIG_MAPPING["qwen2_5_vl"]
    config = make(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return Seeing(folder, model)


def messages(*urls: str, question: str = "Which is larger?") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


SAID = [messages(*URLS), messages(*reversed(URLS)), messages(URLS[0]), messages(URLS[1], question="And?")]
SHOWN = [PICTURES, PICTURES[::-1], PICTURES[:1], PICTURES[1:]]


def check_tokens(seeing: Seeing, found: list[tuple[list[int], list[int]]]) -> None:
    """What was told of each of SAID is what transformers makes of it."""
    expected = [seeing.expected(prompt, pictures) for (prompt, _), pictures in zip(found, SHOWN, strict=True)]
    assert [ids for _, ids in found] == expected


async def told(
    http: aiohttp.ClientSession, server: Server, said: list[dict[str, Any]], begun: asyncio.Event | None = None
) -> tuple[list[int], list[int]]:
    """The prompt's tokens and those of the answer."""
    body = {"model": "m", "messages": said, "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    prompt, ids = list[int](), list[int]()
    async for event in stream(http, f"{server.url}/v1/chat/completions", body | {"ignore_eos": True}):
        prompt = event.get("prompt_token_ids") or prompt
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
        if ids and begun is not None:
            begun.set()
    return prompt, ids


async def num_encoded(http: aiohttp.ClientSession, server: Server) -> float:
    await server.settled(http)
    return sum(
        value for labels, value in await server.labelled(http, "penstock_images_total") if "encoded" in labels.values()
    )


async def check_nothing_is_left(http: aiohttp.ClientSession, server: Server) -> None:
    """Neither descriptors after many images, nor files after the death of the frontend that wrote them."""
    frontend, worker = (server.children()[name] for name in ("penstock-frontend-0", "penstock-worker-0"))
    before = [each.num_fds() for each in (frontend, worker)]
    urls = [data_url(encoded(noise(30, 40, seed=seed))) for seed in range(sized(12, 200))]
    async with aiohttp.ClientSession() as others, asyncio.TaskGroup() as group:
        for url in urls:
            group.create_task(told(others, server, messages(url)))
    await server.settled(http)
    async with asyncio.timeout(60):
        while any(each.num_fds() > few + 2 for each, few in zip((frontend, worker), before, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    [folder] = {Path(file.path).parent for file in frontend.open_files() if "penstock-shared" in file.path}
    assert len(list(folder.iterdir())) > len(urls)  # what is kept for the next turn of a conversation
    frontend.kill()
    async with asyncio.timeout(60):
        while folder.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_what_transformers_sees(seeing: Seeing, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    flags = (
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        "--max-num-batched-tokens",
        "32",
        "--record",
        str(record),
    )
    async with serving(seeing.folder, *flags) as server, aiohttp.ClientSession() as http:
        found = await asyncio.gather(*(told(http, server, said) for said in SAID))
        check_tokens(seeing, found)
        assert await num_encoded(http, server) == len(PICTURES)
        assert await asyncio.gather(*(told(http, server, said) for said in SAID)) == found
        assert await num_encoded(http, server) == len(PICTURES)
        for child in ("penstock-worker-0", "penstock-scheduler"):
            begun = asyncio.Event()
            running = [asyncio.create_task(told(http, server, said, begun)) for said in SAID]
            await begun.wait()
            server.children()[child].kill()
            assert await asyncio.gather(*running) == found
        await server.settled(http)
        await check_nothing_is_left(http, server)
    first = Recording.read(record).runs[0]
    made = [event for event in first.events if isinstance(event, Encoded)]
    assert sorted({each.num_embeddings for each in made}) == [6, 8]
    assert all(each.us > 0 and not each.failed for each in made)
    with LLM(seeing.folder, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        outputs = llm.chat(SAID, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [ids for _, ids in found]


async def test_two_engines_one_of_whose_workers_dies(seeing: Seeing) -> None:
    flags = ("--served-model-name", "m", "--dtype", "float32", "--data-parallel-size", "2")
    async with serving(seeing.folder, *flags) as server, aiohttp.ClientSession() as http:
        await until_both_are_ready(server, http)
        found = await asyncio.gather(*(told(http, server, said) for said in SAID))
        check_tokens(seeing, found)
        await server.settled(http)
        counts = await server.labelled(http, "penstock_images_total")
        encoded = {labels["engine"]: count for labels, count in counts if labels["result"] == "encoded"}
        assert min(encoded[engine] for engine in ("0", "1")) > 0, "both had requests"
        begun = asyncio.Event()
        running = [asyncio.create_task(told(http, server, said, begun)) for said in SAID]
        await begun.wait()
        server.children()["penstock-worker-1-0"].kill()
        assert await asyncio.gather(*running) == found


async def test_ranks_one_of_which_dies(seeing: Seeing) -> None:
    """Each has the whole tower, and a part of the decoder."""
    flags = ("--served-model-name", "m", "--dtype", "float32", "--tensor-parallel-size", "2", "--spare-worker")
    async with serving(seeing.folder, *flags) as server, aiohttp.ClientSession() as http:
        found = await asyncio.gather(*(told(http, server, said) for said in SAID))
        check_tokens(seeing, found)
        assert await num_encoded(http, server) == len(PICTURES)
        for rank in sized((1,), (1, 0)):
            begun = asyncio.Event()
            running = [asyncio.create_task(told(http, server, said, begun)) for said in SAID]
            await begun.wait()
            server.children()[f"penstock-worker-{rank}"].kill()
            assert await asyncio.gather(*running) == found
        await server.settled(http)


async def test_an_engine_at_an_address_shares_no_memory(seeing: Seeing, tmp_path: Path) -> None:
    make_key_file(tmp_path / "keys")
    addresses = [f"--{side}-address=tcp://127.0.0.1:{free_port()}" for side in ("frontend", "worker")]
    flags = ("--served-model-name", "m", "--dtype", "float32", f"--channel-key-file={tmp_path / 'keys'}", *addresses)
    async with serving(seeing.folder, *flags) as server, aiohttp.ClientSession() as http:
        check_tokens(seeing, await asyncio.gather(*(told(http, server, said) for said in SAID)))
