"""How agents are installed, with an npm that is made for it: once, or a sentence why not."""

from pathlib import Path

import pytest

from tests.agents.terminal.installed import NotInstallableError, Package, installed

AGENT = Package("npm", "@some/agent", "1.2.3", "agent")


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of npm; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "npm"
    path.touch(mode=0o755)
    return path


def test_an_agent_is_installed_once(npm: Path) -> None:
    npm.write_text('#!/bin/sh\nmkdir -p "$6/node_modules/.bin"\necho "$7" >> "$6/node_modules/.bin/agent"\n')
    for _ in range(2):
        assert installed(AGENT).read_text() == "@some/agent@1.2.3\n"


def test_why_it_cannot_be_installed(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm.write_text("#!/bin/sh\necho npm error first >&2\necho npm error the registry is away >&2\nexit 1\n")
    with pytest.raises(NotInstallableError, match=r"@some/agent 1\.2\.3 cannot be installed: .* the registry is away"):
        installed(AGENT)
    npm.write_text("#!/bin/sh\n")
    with pytest.raises(NotInstallableError, match="has no command 'agent'"):
        installed(AGENT)
    npm.unlink()
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(NotInstallableError, match="needs npm"):
        installed(AGENT)
