"""Options: one definition, many readers; and refusals that name flag, value and limit."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.cli.commands import COMMANDS
from penstock.config import Config, ConfigError
from penstock.config.addresses import require_addresses, with_addresses
from penstock.config.flags import config_from, flags
from penstock.config.listening import has_files
from penstock.config.parser import Parser
from penstock.ipc.curve import make_key_file
from penstock.models.files.source import eos_token_ids, fingerprint
from penstock.models.finding.registry import open_model, served_model_names
from penstock.models.gguf.choice import gguf_file


def parse(*arguments: str, **environment: str) -> Config:
    parser = Parser("penstock serve", "", exit_on_error=False)
    parser.add_flags(COMMANDS["serve"].groups)
    return config_from(parser.parse_args(arguments), environment)


def test_defaults_live_in_the_structs_alone() -> None:
    assert parse() == Config()


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    config = parse("--port", "9000", PENSTOCK_PORT="9001", PENSTOCK_MAX_NUM_SEQS="7", PENSTOCK_HOST="")
    assert config.frontend.port == 9000
    assert config.scheduler.max_num_seqs == 7
    assert config.frontend.host == "127.0.0.1"  # an empty variable counts as unset


def test_switches_lists_and_numbers() -> None:
    config = parse("--no-enable-prefix-caching", "--served-model-name", "a,b", "--gpu-memory-utilization", "0.5")
    assert not config.scheduler.enable_prefix_caching
    assert config.model.served_model_name == ("a", "b")
    assert config.worker.gpu_memory_utilization == 0.5
    assert parse(PENSTOCK_ENABLE_PREFIX_CACHING="false").scheduler.enable_prefix_caching is False
    assert parse(PENSTOCK_SERVED_MODEL_NAME="a,b").model.served_model_name == ("a", "b")
    twice = parse("--served-model-name", "a,b", "--served-model-name", "c")
    assert twice.model.served_model_name == ("a", "b", "c")


def test_the_system_may_choose_both_ports() -> None:
    assert parse("--port", "0", "--admin-port", "127.0.0.1:0").frontend.admin_address == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-num-seqs", "-1"), ("--max-num-seqs", "-1", ">= 0")),
        (("--page-size", "24"), ("--page-size", "24", "power of two")),
        (("--queue-timeout", "inf"), ("--queue-timeout", "finite", "inf")),
        (("--cpu-kv-cache-gib", "nan"), ("--cpu-kv-cache-gib", "nan")),
        (("--gpu-memory-utilization", "1.5"), ("--gpu-memory-utilization", "1.5")),
        (("--record", "run.jsonl:0"), ("--record", "run.jsonl:0", "at least 1 MiB")),
        (("--disk-kv", "/kv"), ("--disk-kv", "/kv", "FOLDER:GIB")),
        (("--disk-kv", "/kv:0"), ("--disk-kv", "/kv:0", "FOLDER:GIB")),
        (("--admin-port", "here"), ("--admin-port", "here", "HOST:PORT")),
        *(
            (("--cors-origins", f"https://a,{bad}"), ("--cors-origins", bad))
            for bad in ("*", "a", "https://a/", "null")
        ),
        (
            ("--worker-address", "tcp://127.0.0.1:1"),
            ("--worker-address", "127.0.0.1:1", "penstock keys --channel"),
        ),
        (("--channel-key-file", "/nowhere"), ("--channel-key-file", "/nowhere", "No such file")),
    ],
)
def test_a_bad_option_is_named_with_its_value(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert all(word in str(caught.value) for word in words)


def test_a_bad_variable_is_named_too() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_PORT '70000'"):
        parse(PENSTOCK_PORT="70000")


def test_every_option_says_what_it_is() -> None:
    assert all(len(flag.help) > 10 for flag in flags())
    names = [flag.field for flag in flags()]
    assert len(names) == len(set(names)), "flags are unique over all groups"


def test_config_survives_the_way_to_a_child() -> None:
    config = parse("--max-num-seqs", "5", "--served-model-name", "x")
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.json.decode(b'{"scheduler": {"nonsense": 1}}', type=Config)


def test_addresses_are_filled_where_empty(tmp_path: Path) -> None:
    make_key_file(tmp_path / "keys")
    given = parse("--worker-address", "tcp://127.0.0.1:5552", "--channel-key-file", str(tmp_path / "keys"))
    config = with_addresses(given, tmp_path)
    assert config.ipc.worker_address == "tcp://127.0.0.1:5552"
    assert config.ipc.frontend_address == f"ipc://{tmp_path}/frontends.sock"
    with pytest.raises(ConfigError, match="--frontend-address"):
        require_addresses(given, frontend=True, worker=True)


def test_checkpoint_facts(tmp_path: Path) -> None:
    config = parse("--model", str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        _ = open_model(config).config
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert open_model(config).path == tmp_path
    assert eos_token_ids(open_model(config)) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert eos_token_ids(open_model(config)) == (3, 4)
    first = fingerprint(open_model(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "hidden_size": 8}))
    assert fingerprint(open_model(config)) != first
    assert served_model_names(config) == (str(tmp_path),)
    assert served_model_names(parse()) == ("penstock-demo",)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        eos_token_ids(open_model(config))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Some Model-Q4_K_M.gguf", "Some Model-Q4_K_M"),
        ("model.GGUF", "model"),
        ("/a/llama-8b-Q8_0-00001-of-00003.gguf", "llama-8b-Q8_0"),
    ],
)
def test_a_gguf_file_is_served_under_its_name_without_its_folder(path: str, name: str) -> None:
    assert served_model_names(parse("--model", path)) == (name,)
    assert served_model_names(parse("--model", path, "--served-model-name", "mine")) == ("mine",)


def test_a_file_is_gguf_by_what_it_holds_and_not_by_its_name(tmp_path: Path) -> None:
    """Ollama's downloads have no suffix."""
    blob, other = tmp_path / "sha256-1234", tmp_path / "notes"
    blob.write_bytes(b"GGUF\3\0\0\0")
    other.write_bytes(b"GGU")
    assert (gguf_file(blob), gguf_file(other)) == (blob, None)
    assert served_model_names(parse("--model", str(blob))) == ("sha256-1234",)


def test_the_access_log_alone_is_worth_a_reload() -> None:
    """SIGHUP opens it anew: the supervisor must pass the signal on."""
    assert has_files(parse("--access-log", "requests.log").frontend)
    assert not has_files(parse().frontend)
