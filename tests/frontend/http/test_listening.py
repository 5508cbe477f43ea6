"""Where a frontend may listen: nobody gets in by oversight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import ConfigError, FrontendOptions
from penstock.config.listening import check_listening, is_loopback

PASSED = "--frontend-address"
"""The next thing that `penstock frontend` misses here."""


def said(*arguments: str, **environment: str) -> str:
    """What `penstock ARGUMENTS` refuses to start with: one line."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_others_are_not_let_in_by_oversight(command: str) -> None:
    line = said(command, "--host", "0.0.0.0")
    assert all(name in line for name in ("--host 0.0.0.0", "--api-keys-file", "PENSTOCK_API_KEY", "--insecure-bind"))


def test_a_key_or_the_word_for_it_lets_them_in() -> None:
    assert PASSED in said("frontend")
    assert PASSED in said("frontend", "--host", "0.0.0.0", "--insecure-bind")
    assert PASSED in said("frontend", "--host", "0.0.0.0", PENSTOCK_API_KEY="pk-one")
    assert PASSED in said("frontend", PENSTOCK_HOST="::", PENSTOCK_INSECURE_BIND="true")
    assert PASSED not in said("frontend", PENSTOCK_HOST="::", PENSTOCK_INSECURE_BIND="false")


def test_a_wrong_file_of_keys_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "cannot be read" in said("serve", "--api-keys-file", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_listening(FrontendOptions(host=host), {})


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.7", "::ffff:10.0.0.7", "localhost.example.org", "box"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError):
        check_listening(FrontendOptions(host=host), {})
