"""The command line as people type it, who may know another engine's."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from penstock import demo
from penstock.cli.commands import COMMANDS
from penstock.cli.tool import INTERRUPTED, UNREAD
from penstock.config import ConfigError
from penstock.config.api_keys import client_key, load_api_keys
from penstock.config.flags import flags
from penstock.config.foreign_flags import FOREIGN_FLAGS, unknown_variables, without_foreign_flags
from penstock.config.foreign_tables import VALUES
from tests.frontend.adapters.adapters import write_adapter


def penstock(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run a command to its end: exit code, stdout, stderr."""
    command = [sys.executable, "-m", "penstock.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment or None)
    return done.returncode, done.stdout, done.stderr


DEMO = Path(demo.__file__).parent / "model"
LISTS = [flag.name for flag in flags(("model", "scheduler", "worker", "frontend", "ipc", "log")) if flag.default == ()]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_does_not_swallow_the_model(name: str, tmp_path: Path) -> None:
    """The folder after it is the model: it has no config.json, which is what must be said."""
    adapter = f"a={write_adapter(tmp_path / 'adapter')}"
    given = {"--cors-origins": "https://a.example", "--trusted-proxies": "10.0.0.7", "--lora": adapter}
    given |= {"--logits-processors": "a=math:exp"}
    value = given.get(name, "foo")
    code, _, said = penstock("serve", name, value, tmp_path)
    assert code == 2
    assert str(tmp_path) in said
    assert "config.json" in said
    code, _, said = penstock("serve", tmp_path, name, value, "b")
    assert code == 2
    assert "unexpected word 'b'" in said


@pytest.mark.parametrize("arguments", [("--version",), ("-V",), ("version",)])
def test_version(arguments: tuple[str, ...]) -> None:
    code, said, _ = penstock(*arguments)
    assert code == 0
    assert said.startswith("penstock ")


@pytest.mark.parametrize(("arguments", "code"), [(("bench", "--help"), 0), (("bench",), 2)])
def test_bench_lists_its_commands(arguments: tuple[str, ...], code: int) -> None:
    found, said, _ = penstock(*arguments)
    assert found == code
    assert "bench serve" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--qps", "-1", "m"), "--qps: must be above 0"),
        (("plan", "--ttft", "nan", "m"), "--ttft: must be a number"),
        (("plan", "--price-per-hour", "0", "m"), "--price-per-hour: must be above 0"),
        (("plan", "--measure", str(DEMO)), "--measure measures this machine: say --gpu this"),
        (("simulate", "--shared-prefix-len", "-3", "m"), "--shared-prefix-len: must be a whole number of at least 0"),
        (("bench", "serve", "--warmup", "-1"), "--warmup: must be a whole number of at least 0"),
        (("bench", "serve", "--timeout", "0"), "--timeout: must be above 0"),
        (("drain", "--seconds", "nan"), "--seconds: must be a number"),
        (("probe", "--seconds", "-1", "tcp://127.0.0.1:1"), "--seconds: must be at least 0"),
        (("probe", "127.0.0.1"), "'127.0.0.1' is no address of a scheduler"),
        (("keys", "--requests-per-minute", "0", "a"), "--requests-per-minute: must be a whole number of at least 1"),
        (("keys", "--weight", "5000", "a"), "weight must be a number from 0.001 to 1000"),
        (("keys", "--namespace", "a b", "a"), "namespace must be 1 to 64 letters"),
        (("keys", ""), "id must be a string, and not empty"),
    ],
)
def test_values_that_cannot_be_are_refused_in_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    code, printed, error = penstock(*arguments)
    assert (code, printed) == (2, "")
    assert said in error
    assert "Traceback" not in error


def test_a_key_can_be_for_anybody(tmp_path: Path) -> None:
    code, entry, _ = penstock("keys", "zoë 😀", "--weight", "2")
    assert code == 0
    (tmp_path / "keys").write_text(entry)
    [key] = load_api_keys(str(tmp_path / "keys"), {})
    assert (key.id, key.weight) == ("zoë 😀", 2.0)


def test_a_reader_that_has_seen_enough_ends_a_command() -> None:
    command = [sys.executable, "-m", "penstock.cli", "keys", "a"]
    begin, end = os.pipe()
    os.close(begin)
    done = subprocess.run(command, stdout=end, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(end)
    assert done.returncode == UNREAD
    assert done.stderr.startswith("API key")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_command() -> None:
    command = [sys.executable, "-m", "penstock.cli", "drain", "--url"]
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen([*command, url], stderr=subprocess.PIPE, text=True)
        connection, _ = listener.accept()
        connection.recv(4096)  # it has asked, and waits
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, said) == (INTERRUPTED, "")


def test_what_speaks_no_http_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with ThreadPoolExecutor() as threads:
            ended = threads.submit(penstock, "drain", "--url", url)
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.close()
            code, _, said = ended.result()
    assert code == 2
    assert said.startswith(f"penstock drain: {url} does not answer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pull", "llama3"), ("no folder or file 'llama3'", "Qwen/Qwen3-0.6B")),
        (("run", "qwen3:0.6b"), ("no folder or file 'qwen3:0.6b'", "Qwen/Qwen3-0.6B")),
        (("serve", "qwen3:0.6b"), ("no folder or file 'qwen3:0.6b'", "Qwen/Qwen3-0.6B")),
        (("srve",), ("did you mean serve",)),
        (("sim",), ("did you mean simulate",)),
        (("frobnicate",), ("see `penstock --help`",)),
        (("show", "m"), ("penstock models MODEL",)),
        (("plan", "--gp", "h100", "m"), ("there is no option --gp",)),
        (("chat", "--syste", "x"), ("did you mean --system",)),
        (("run", "m", "hello", "--max-num-seq", "3"), ("did you mean --max-num-seqs",)),
        (("serve", "--max-num-seks", "3"), ("did you mean --max-num-seqs",)),
        (("serve", "--nothing-like-it"), ("--nothing-like-it", "--help")),
        (("serve", "--num-speculative-tokens", "2"), ("--num-speculative-tokens", "--speculative-config")),
        (("serve", "--swap_space=4"), ("--swap_space 4", "--host-kv-gib")),
        (("serve", "--seed", "3"), ("--seed", "not supported", "each request")),
        (("serve", "--mem-fraction-static", "0.8"), ("--gpu-memory-utilization",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_does_not_exist_is_said_with_what_does(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, _, said = penstock(*arguments)
    assert code == 2
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words)
    assert "hf download" not in said


def test_foreign_flags_are_not_ours() -> None:
    """An option that Penstock has is never taken for another engine's; and what is named in its place exists."""
    ours = {flag.name for flag in flags()}
    assert not ours & FOREIGN_FLAGS.keys()
    named = {word.strip(",") for flag in FOREIGN_FLAGS.values() for word in flag.use.split() if word.startswith("--")}
    assert named <= ours | {"--no-enable-prefix-caching"}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["serve", "--swap-space", "0", "m"], ["serve", "m"]),
        (["serve", "--swap-space=0", "m"], ["serve", "m"]),
        (["serve", "--enable-chunked-prefill", "m"], ["serve", "m"]),
        (["serve", "-fa", "m"], ["serve", "m"]),
        (["serve", "-fa", "on", "-n", "-1", "m"], ["serve", "m"]),
        (["serve", "--jinja", "--metrics", "-cb", "m"], ["serve", "m"]),
        (
            ["serve", "--dtype", "half", "--reasoning-parser=deepseek_r1", "m"],
            ["serve", "--dtype", "float16", "--reasoning-parser=think", "m"],
        ),
        (["serve", "--tool_call_parser", "qwen3_xml", "m"], ["serve", "--tool_call_parser", "qwen3_coder", "m"]),
        (["serve", "--tool-call-parser", "hermes", "--dtype"], ["serve", "--tool-call-parser", "hermes", "--dtype"]),
        (
            ["serve", "m", "--enable-lora", "--lora-modules", "a=/a", "b=/b", "--port", "1"],
            ["serve", "m", "--lora-modules=a=/a", "--lora-modules=b=/b", "--port", "1"],
        ),
        (["serve", "--lora_modules=a=o/a", "m"], ["serve", "--lora_modules=a=o/a", "m"]),
        (
            ["serve", "--lora-paths", '{"name": "a", "path": "/a", "base_model_name": "m"}', "b=/b", "m"],
            ["serve", "--lora-paths=a=/a", "--lora-paths=b=/b", "m"],
        ),
        (["serve", "--lora-modules", '[{"name": "a", "path": "/a"}]'], ["serve", "--lora-modules=a=/a"]),
    ],
)
def test_what_is_done_anyway_may_be_asked_for(arguments: list[str], left: list[str]) -> None:
    assert without_foreign_flags(arguments) == left


@pytest.mark.parametrize("flag", FOREIGN_FLAGS)
def test_each_foreign_flag_is_explained(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        without_foreign_flags(["serve", flag + "=something else"])
    assert flag in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "NAME=PATH"),
        (("--port",), "NAME=PATH"),
        (("{",), "JSON"),
        (('{"name": "a"}',), "texts"),
        (('{"name": "a", "path": "/a", "rank": 4}',), "base_model_name"),
    ],
)
def test_adapters_that_cannot_be_read_are_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"--lora-modules .*{says}"):
        without_foreign_flags(["serve", "--lora-modules", *words])


@pytest.mark.parametrize("word", ["off", "false", "0"])
def test_what_cannot_be_off_is_refused_and_its_value_is_no_model(word: str) -> None:
    for flag in ("-fa", "--enable-chunked-prefill"):
        with pytest.raises(ConfigError, match=f"{flag} {word} is not supported: it is always on"):
            without_foreign_flags(["serve", flag, word, "m"])


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.module])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    module = importlib.import_module(COMMANDS[name].module)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{COMMANDS[name].module}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith(f"usage: penstock {'models' if name == 'list' else name} ")
    assert "[OPTIONS]" in said.splitlines()[0]
    assert len(said.splitlines()) <= 90
    assert max(map(len, said.splitlines())) <= 100


def test_commands_are_listed_by_what_they_are_for() -> None:
    code, said, _ = penstock("--help")
    assert code == 0
    assert all(f"  {name} " in said for name in COMMANDS)


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({}, ""),
        ({"OPENAI_API_KEY": "theirs"}, "theirs"),
        ({"PENSTOCK_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "ours"),
        ({"PENSTOCK_API_KEY": "", "OPENAI_API_KEY": "theirs"}, "theirs"),
    ],
)
def test_the_key_of_all_clients(variables: dict[str, str], key: str) -> None:
    assert client_key(variables) == key


def test_values_of_other_engines_have_names_here() -> None:
    ours = {flag.name: get_args(flag.type) for flag in flags()}
    for option, values in VALUES.items():
        assert set(values.values()) <= set(ours[option])
        assert not set(values) & set(ours[option])


@pytest.mark.parametrize("name", ["serve", "scheduler", "run"])
@pytest.mark.parametrize("typed", [("m", "--batch-size", "2048"), ("--batch_size=2048", "m")])
def test_what_is_gone_is_told_with_what_to_do(name: str, typed: tuple[str, ...]) -> None:
    code, _, said = penstock(name, *typed)
    assert code == 2
    [sentence] = said.splitlines()
    assert sentence.startswith(f"penstock {name}: --batch-size is gone; use --max-num-seqs")
    assert "--max-num-batched-tokens" in sentence


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        without_foreign_flags(["serve", "--api-key", "sk-secret"])
    assert "sk-secret" not in str(caught.value)


def test_unknown_variables_are_told() -> None:
    said = unknown_variables(
        {"PENSTOCK_MAX_NUM_SEQ": "3", "PENSTOCK_PORT": "1", "PENSTOCK_SERVICE_HOST": "x", "HOME": ""}
    )
    assert said == ["the variable PENSTOCK_MAX_NUM_SEQ is unknown; did you mean PENSTOCK_MAX_NUM_SEQS?"]
    code, _, told = penstock("serve", "/nowhere", PENSTOCK_MAX_NUM_SEQ="3", PENSTOCK_HEAD_TIMEOUT="5")
    assert code == 2
    assert said[0] in told
    assert "the variable PENSTOCK_HEAD_TIMEOUT is gone; a request's head must arrive in 10 seconds" in told


def test_variables_that_are_gone_and_empty_are_nothing() -> None:
    """As files for Compose have them."""
    assert unknown_variables({"PENSTOCK_HEAD_TIMEOUT": ""}) == []


def test_chat_without_a_server_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, said = penstock("chat", "--url", url)
    assert code == 1
    assert "penstock serve" in said
    assert "ssl:default" not in said
