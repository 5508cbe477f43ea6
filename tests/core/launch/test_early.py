"""A spare that is started before its launch is one of its processes, or ends with the attempt."""

import psutil
import pytest

from penstock.config import Config, ConfigError, IpcOptions, WorkerOptions
from penstock.core.launch.early import EarlySpare, early_spare
from penstock.core.launch.spare import Spare

CONFIG = Config(ipc=IpcOptions(max_heartbeat_interval=0.05))
FAKE = "tests.core.fake_child.spare"


def test_it_ends_with_what_it_was_started_for() -> None:
    def refused() -> int:
        with early_spare(CONFIG) as early:
            assert early is not None
            raise ConfigError(str(early.pid))

    with pytest.raises(ConfigError) as caught:
        refused()
    assert not psutil.pid_exists(int(str(caught.value)))


def test_there_is_none_without_spares() -> None:
    with early_spare(Config(worker=WorkerOptions(spare_worker=False))) as early:
        assert early is None


async def test_it_is_the_first_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPARE", "imported")
    early = EarlySpare(FAKE, CONFIG)
    spare = Spare(FAKE, CONFIG, early)
    assert spare.pids == {early.pid}
    await spare.until_imported()
    assert spare.has_imported
    assert spare.pids == {early.pid}
    early.end()  # it is not its own any more
    assert spare.is_there
    await spare.end()
    assert not psutil.pid_exists(early.pid)
    assert not spare.pids


async def test_its_death_is_noticed() -> None:
    """A worker is started without it then."""
    early = EarlySpare(FAKE, CONFIG)  # the fake one dies
    spare = Spare(FAKE, CONFIG, early)
    await spare.until_imported()
    assert not spare.is_there
    await spare.end()
    assert not psutil.pid_exists(early.pid)
