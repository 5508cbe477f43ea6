"""Adapters, as clients and administrators see them: models that come and go while the engine runs."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.config import ConfigError
from penstock.frontend.api.service import Service
from penstock.frontend.errors import ShuttingDown
from penstock.ipc.messages import SayHello
from penstock.parts.adapters.frontend import Adapters
from penstock.parts.adapters.messages import LoadAdapter, UnloadAdapter
from penstock.parts.adapters.options import AdapterOptions
from tests.frontend.adapters.adapters import Loader, write_adapter
from tests.frontend.checkpoint_folder import VOCAB_SIZE, write_checkpoint
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import Response, chat, complete, error_of, events, get, post, send
from tests.frontend.live_server import LiveServer, live_server

SHOUTS = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"


class Scene(NamedTuple):
    live: LiveServer
    loader: Loader

    @property
    def service(self) -> Service:
        return self.live.server.service


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for tokens beyond the tokenizer's, as many models have."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}))
    return folder


@pytest.fixture(scope="module")
def shared_scene(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    fixed = write_adapter(tmp_path_factory.mktemp("fixed"), "fixed")
    options = AdapterOptions(lora=(f"fixed={fixed}",))
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as folder,
        live_server(checkpoint, Path(folder), parts=(options,), frontend={"metrics_names": "both"}) as live,
    ):
        yield Scene(live, live.do(lambda: Loader(live.scheduler)))


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    """The shared server, with the adapter "fixed" alone."""
    live, loader = shared_scene
    live.reset()
    loader.error, loader.state = "", "ready"
    for name in {*shared_scene.service.variants} - {"fixed"}:
        assert unload(live, name).status == 200
    live.wait_until(lambda: not [key for key in loader.adapters if not key.startswith("fixed@")])
    loader.orders.clear()
    yield shared_scene
    live.wait_until(lambda: live.server.service.engine.num_live == 0)


def load(live: LiveServer, name: str, path: Path | str, **fields: Any) -> Response:
    return post(live, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)} | fields)


def unload(live: LiveServer, name: str, **fields: Any) -> Response:
    return post(live, "/v1/unload_lora_adapter", {"lora_name": name} | fields)


def models(live: LiveServer) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in get(live, "/v1/models").json()["data"]}


def test_an_adapter_is_a_model_from_its_load_to_its_unload(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    folder = write_adapter(tmp_path / "a")
    assert error_of(complete(live, model="sql"), 404)["code"] == "model_not_found"
    answer = load(live, "sql", folder)
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    [order] = loader.orders
    assert isinstance(order, LoadAdapter)
    assert order.path == str(folder)
    assert order.key.startswith("sql@")
    card, base = models(live)["sql"], models(live)["test/model"]
    assert (card["parent"], card["root"], base["parent"]) == ("test/model", str(folder), None)
    assert get(live, "/v1/models/sql").json() == card
    said = complete(live, model="sql").json()
    assert said["model"] == "sql"
    assert said["system_fingerprint"] == card["system_fingerprint"] != base["system_fingerprint"]
    complete(live)
    assert [request.adapter for request in live.scheduler.added] == [order.key, ""]
    assert unload(live, "sql").status == 200
    live.wait_until(lambda: loader.orders[1:] == [UnloadAdapter(order.key, abort=False)])
    assert "sql" not in models(live)
    assert error_of(complete(live, model="sql"), 404)["code"] == "model_not_found"
    assert error_of(unload(live, "sql"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Hello"]}),
        ("/v1/score", {"text_1": "Hi", "text_2": "Hello"}),
        ("/pooling", {"input": "Hi"}),
    ],
)
def test_every_api_takes_its_name(scene: Scene, path: str, body: dict[str, Any]) -> None:
    live, _ = scene
    if path.endswith(("embeddings", "embed", "rerank", "score", "pooling")):
        live.plays(lambda request, index: Script(pooled=b"\0\0\x80\x3f" * 4))
    answer = post(live, path, body | {"model": "fixed"})
    assert answer.status == 200, answer.text
    assert {request.adapter.partition("@")[0] for request in live.scheduler.added} == {"fixed"}
    assert answer.json()["model"] == "fixed"
    assert post(live, path, body | {"model": "unknown"}).status == 404


def test_tokens_are_counted_and_texts_listed_for_it(scene: Scene) -> None:
    live, _ = scene
    assert post(live, "/tokenize", {"model": "fixed", "prompt": "Hi"}).json()["count"] > 0
    body = {"model": "fixed", "messages": [{"role": "user", "content": "Hi"}]}
    assert post(live, "/v1/messages/count_tokens", body).json()["input_tokens"] > 0
    assert "fixed:latest" in {each["name"] for each in get(live, "/api/tags").json()["models"]}
    assert post(live, "/api/show", {"model": "fixed"}).status == 200
    version = {"anthropic-version": "2023-06-01"}
    assert "fixed" in {each["id"] for each in get(live, "/v1/models", **version).json()["data"]}
    assert get(live, "/v2/models/fixed/ready").status == 200


def test_its_requests_are_counted_under_its_name(scene: Scene) -> None:
    live, _ = scene
    before = metric(live, 'penstock_adapter_requests_total{adapter="fixed"}')
    assert complete(live, model="fixed", max_tokens=3).status == 200
    assert metric(live, 'penstock_adapter_requests_total{adapter="fixed"}') == before + 1
    assert metric(live, 'penstock_adapter_generation_tokens_total{adapter="fixed"}') > 0


def test_those_in_use_are_told(scene: Scene) -> None:
    live, _ = scene
    in_use = 'vllm:lora_requests_info{max_lora="32",running_lora_adapters="%s",waiting_lora_adapters=""}'
    assert metric(live, in_use % "") == 1
    live.gives([40], hangs=True)
    asking = threading.Thread(target=lambda: complete(live, model="fixed"))
    asking.start()
    live.wait_until(lambda: live.scheduler.num_running == 1)
    assert metric(live, in_use % "fixed") == 1
    assert metric(live, 'penstock_adapter_requests_in_frontend{adapter="fixed"}') == 1
    [generation] = scene.service.generations
    live.do(lambda: generation.fail(ShuttingDown("enough")))
    asking.join()


def metric(live: LiveServer, name: str) -> float:
    lines = [line for line in get(live, "/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


# --- what is refused --------------------------------------------------------------------------------


def test_what_an_engine_cannot_load_is_refused_with_its_sentence(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    loader.error = "rank 512 is more than --max-lora-rank 64"
    error = error_of(load(live, "big", write_adapter(tmp_path / "big")), 400)
    assert (error["param"], error["message"]) == ("lora_path", f"lora_path: {loader.error}")
    live.wait_until(lambda: not [key for key in loader.adapters if key.startswith("big@")])
    assert "big" not in models(live)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"lora_name": "test/model", "lora_path": "/x"}, "the model's own name"),
        ({"lora_name": "a@b", "lora_path": "/x"}, "must not have"),
        ({"lora_name": "fixed", "lora_path": "/x", "load_inplace": True}, "--lora"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(scene: Scene, body: dict[str, Any], says: str) -> None:
    live, loader = scene
    assert says in error_of(post(live, "/v1/load_lora_adapter", body), 400)["message"]
    assert not loader.orders


def test_what_an_option_names_stays(scene: Scene) -> None:
    assert "--lora" in error_of(unload(scene.live, "fixed"), 400)["message"]


def test_a_folder_without_an_adapter_is_refused(scene: Scene, checkpoint: Path) -> None:
    assert "adapter_config.json" in error_of(load(scene.live, "x", checkpoint), 400)["message"]


def test_a_second_one_of_a_name_must_be_asked_for(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    folder = write_adapter(tmp_path / "a", "one")
    assert load(live, "again", folder).status == 200
    assert "load_inplace" in error_of(load(live, "again", folder), 400)["message"]
    assert load(live, "again", folder, load_inplace=True).status == 200
    assert len(loader.orders) == 1  # nothing has changed
    write_adapter(tmp_path / "a", "two")
    assert load(live, "again", folder, load_inplace=True).status == 200
    first, second = (order.key for order in loader.orders[:2])
    assert first != second
    complete(live, model="again")
    assert live.scheduler.added[-1].adapter == second
    live.wait_until(lambda: loader.orders[2:] == [UnloadAdapter(first, abort=False)])
    assert "again" in models(live)


def test_one_that_engines_could_not_read_again_is_loaded_again(scene: Scene, tmp_path: Path) -> None:
    """Also from another place: its weights are the same."""
    live, loader = scene
    assert load(live, "moved", write_adapter(tmp_path / "a", "moved")).status == 200
    [first] = loader.orders
    live.do(lambda: loader.set(first.key, str(tmp_path / "a"), "failed", "its files have changed"))
    assert load(live, "moved", tmp_path / "a", load_inplace=True).status == 200
    assert load(live, "moved", write_adapter(tmp_path / "b", "moved"), load_inplace=True).status == 200
    orders = [order for order in loader.orders if isinstance(order, LoadAdapter)]
    assert [order.path for order in orders] == [str(tmp_path / "a")] * 2 + [str(tmp_path / "b")]
    assert {order.key for order in loader.orders} == {first.key}
    assert models(live)["moved"]["root"] == str(tmp_path / "b")


# --- texts ------------------------------------------------------------------------------------------


def test_its_own_template_makes_the_prompt(scene: Scene, tmp_path: Path) -> None:
    live, _ = scene
    assert load(live, "loud", write_adapter(tmp_path / "loud", chat_template_jinja=SHOUTS)).status == 200
    assert load(live, "loud2", write_adapter(tmp_path / "loud2", chat_template_jinja=SHOUTS)).status == 200
    for name in ("loud", "loud2"):
        assert prompt_of(live, name) == "HELLO"
    assert prompt_of(live, "fixed") == prompt_of(live, "test/model") != "HELLO"
    variants = scene.service.variants
    assert variants["loud"].prompts is variants["loud2"].prompts is not scene.service.prompts
    assert variants["fixed"].prompts is scene.service.prompts


def test_a_file_of_llama_cpp_has_no_texts_of_its_own(scene: Scene, tmp_path: Path) -> None:
    """Whatever lies beside it. Another content is another adapter."""
    live, loader = scene
    write_adapter(tmp_path, chat_template_jinja=SHOUTS)
    keys = []
    for content in (b"GGUF one", b"GGUF two"):
        (tmp_path / "a.gguf").write_bytes(content)
        assert load(live, "file", tmp_path / "a.gguf", load_inplace=True).status == 200
        assert prompt_of(live, "file") == prompt_of(live, "test/model")
        keys.append(loader.orders[-1].key)
    assert len(set(keys)) == 2
    assert load(live, "none", tmp_path / "b.gguf").status == 400


def test_texts_that_have_changed_are_read_again(scene: Scene, tmp_path: Path) -> None:
    """Beside the same weights, too."""
    live, loader = scene
    assert load(live, "texts", write_adapter(tmp_path / "a")).status == 200
    assert prompt_of(live, "texts") != "HELLO"
    write_adapter(tmp_path / "a", chat_template_jinja=SHOUTS)
    assert load(live, "texts", tmp_path / "a", load_inplace=True).status == 200
    assert prompt_of(live, "texts") == "HELLO"
    assert len(loader.orders) == 1
    assert unload(live, "texts").status == 200


def prompt_of(live: LiveServer, model: str) -> str:
    assert chat(live, model=model).status == 200
    tokens = live.scheduler.added[-1].prompt_token_ids
    return live.tokenizer.decode([*memoryview(tokens).cast("i")])


def test_copies_of_the_models_own_texts_cost_nothing(scene: Scene, checkpoint: Path, tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    texts = {name.replace(".", "_"): (checkpoint / name).read_text() for name in names}
    assert load(scene.live, "copy", write_adapter(tmp_path / "copy", **texts)).status == 200
    assert scene.service.variants["copy"].prompts is scene.service.prompts
    assert scene.service.variants["copy"].model.tokenizer is scene.service.model.tokenizer


def added_tokens(*numbers: int) -> str:
    """A tokenizer_config.json with tokens <|NUMBER|>."""
    tokens = {number: {"content": f"<|{number}|>", "special": True} for number in numbers}
    return json.dumps({"added_tokens_decoder": tokens})


def test_a_token_that_it_adds_is_read(scene: Scene, tmp_path: Path) -> None:
    live, _ = scene
    size = live.tokenizer.vocab_size
    folder = write_adapter(tmp_path / "calls", tokenizer_config_json=added_tokens(size))
    answer = load(live, "calls", folder)
    assert answer.status == 200, answer.text
    assert post(live, "/tokenize", {"model": "calls", "prompt": f"<|{size}|>"}).json()["tokens"] == [size]
    assert len(post(live, "/tokenize", {"prompt": f"<|{size}|>"}).json()["tokens"]) > 1


def test_texts_that_do_not_fit_are_refused(scene: Scene, checkpoint: Path, tmp_path: Path) -> None:
    live, _ = scene
    other = json.loads((checkpoint / "tokenizer.json").read_text())
    numbers = other["model"]["vocab"]
    numbers["a"], numbers["b"] = numbers["b"], numbers["a"]
    error = error_of(load(live, "foreign", write_adapter(tmp_path / "foreign", tokenizer_json=json.dumps(other))), 400)
    assert "is another model's" in error["message"]
    texts = added_tokens(*range(live.tokenizer.vocab_size, VOCAB_SIZE + 1))
    error = error_of(load(live, "more", write_adapter(tmp_path / "more", tokenizer_config_json=texts)), 400)
    assert f"'<|{VOCAB_SIZE}|>' with the number {VOCAB_SIZE}" in error["message"]
    error = error_of(load(live, "bad", write_adapter(tmp_path / "bad", chat_template_jinja="{% if %}")), 400)
    assert "template" in error["message"]


# --- other frontends, other engines -----------------------------------------------------------------


def test_what_another_frontend_loads_and_unloads_is_heard(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    folder = str(write_adapter(tmp_path / "theirs"))
    live.do(lambda: loader.set("theirs@1", folder, "loading"))
    live.wait_until(lambda: "theirs" in scene.service.coming)
    assert "theirs" not in models(live)
    threading.Timer(0.2, lambda: live.do(lambda: loader.set("theirs@1", folder, "ready"))).start()
    assert complete(live, model="theirs").status == 200  # it waits until engines have it
    assert live.scheduler.added[-1].adapter == "theirs@1"
    live.do(lambda: loader.set("theirs@1", folder, "leaving"))
    live.wait_until(lambda: "theirs" not in scene.service.variants)
    live.do(loader.adapters.clear)


def test_what_another_frontend_fails_to_load_is_never_served(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    folder = str(write_adapter(tmp_path / "theirs"))
    live.do(lambda: loader.set("broken@1", folder, "loading"))
    live.do(lambda: loader.set("broken@1", folder, "failed", "it is damaged"))
    live.wait_until(lambda: "broken" not in scene.service.coming)
    assert error_of(complete(live, model="broken"), 404)["code"] == "model_not_found"
    live.do(loader.adapters.clear)
    live.do(loader.tell)


def test_a_load_ends_when_another_frontend_unloads_it(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    loader.state = "loading"
    folder = str(write_adapter(tmp_path / "brief"))
    answers: list[Response] = []
    loading = threading.Thread(target=lambda: answers.append(load(live, "brief", folder)))
    loading.start()
    live.wait_until(lambda: any(key.startswith("brief@") for key in loader.adapters))
    key = next(key for key in loader.adapters if key.startswith("brief@"))
    live.do(lambda: loader.set(key, folder, "leaving"))
    loading.join(10.0)
    assert [answer.status for answer in answers] == [503]


def restart(scene: Scene) -> None:
    """The scheduler is another process, which knows neither peers nor adapters."""
    live, loader = scene

    def forget() -> None:
        peers = [*live.scheduler.peers]
        live.scheduler.forget_peers()
        loader.adapters.clear()
        loader.orders.clear()
        live.scheduler.received.clear()
        for peer in peers:
            live.scheduler.router.send(peer, SayHello())

    live.do(forget)


def test_an_engine_that_restarts_gets_them_again_before_their_requests(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    assert load(live, "late", write_adapter(tmp_path / "late")).status == 200
    [order] = loader.orders
    tokens = live.tokenizer.encode("Water runs down", add_special_tokens=False)
    live.gives(tokens, delay=0.02)
    answers: list[Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(live, model="late", stream=True)))
    asking.start()
    live.wait_until(lambda: live.scheduler.num_running == 1)
    restart(scene)
    asking.join()
    assert "".join(event["choices"][0]["text"] for event in events(answers[0])[:-1]) == "Water runs down"
    assert [each for each in loader.orders if not each.key.startswith("fixed@")] == [order]
    assert [each.key.partition("@")[0] for each in loader.orders] == ["fixed", "late"]
    kinds = [type(message).__name__ for message in live.scheduler.received]
    assert kinds.index("LoadAdapter") < kinds.index("AddRequest")
    assert "late" in models(live)


def test_a_stream_outlives_its_adapter_even_if_the_engine_restarts(scene: Scene, tmp_path: Path) -> None:
    live, loader = scene
    assert load(live, "gone", write_adapter(tmp_path / "gone")).status == 200
    key = loader.orders[0].key
    ids = live.tokenizer.encode("Water runs down the pipe", add_special_tokens=False)
    live.gives(ids[:2], hangs=True)  # it does not end before the engine does
    answers: list[Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(live, model="gone", stream=True)))
    asking.start()
    live.wait_until(lambda: live.scheduler.num_running == 1)
    assert unload(live, "gone").status == 200
    live.gives(ids)
    restart(scene)
    asking.join()
    assert "".join(event["choices"][0]["text"] for event in events(answers[0])[:-1]) == "Water runs down the pipe"
    live.wait_until(lambda: loader.orders[-1] == UnloadAdapter(key))
    again, last = (order for order in loader.orders if order.key == key)
    assert isinstance(again, LoadAdapter)
    assert again.is_leaving
    assert last == UnloadAdapter(key)
    assert "gone" not in models(live)


# --- options ----------------------------------------------------------------------------------------


def test_an_adapter_of_an_option_that_cannot_be_read_is_named(scene: Scene, tmp_path: Path) -> None:
    live, _ = scene
    folder = write_adapter(tmp_path / "bad", chat_template_jinja="{% if %}")
    adapters = scene.service.parts.get(Adapters)
    assert adapters is not None
    for name, says in (("bad", "template"), ("alias", "own name")):
        serving = asyncio.run_coroutine_threadsafe(adapters.catalogue.serve_fixed({name: str(folder)}), live.loop)
        with pytest.raises(ConfigError, match=f"--lora {name}=.*{says}"):
            serving.result(60)


def test_loading_is_for_administrators(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"admin_port": "1"}) as live:
        assert load(live, "x", "/x").status == 404
        admin = type("Admin", (), {"port": live.admin_port})()
        assert post(admin, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}).status == 400
        assert send(admin, "GET", "/v1/models").status == 404
