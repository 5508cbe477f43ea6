"""The engine in process, and what its worker does beside steps."""

from collections.abc import Iterable

from penstock.gpu_worker.part import WorkerPart
from penstock.in_process import InProcessEngine
from penstock.ipc.messages import Heartbeat, Message, ProfileSteps


class Slow(WorkerPart):
    """Is done when it has been asked three times."""

    orders = (ProfileSteps,)

    def __init__(self) -> None:
        self.num_asked = 0

    def order(self, message: Message) -> None:
        self.num_asked = 3

    @property
    def is_busy(self) -> bool:
        return self.num_asked > 0

    def take_done(self) -> Iterable[Message]:
        self.num_asked -= 1
        return () if self.num_asked else (Heartbeat(),)


class Talks(WorkerPart):
    """Tells something whenever it is asked."""

    def take_done(self) -> Iterable[Message]:
        return (Heartbeat(),)


def test_what_another_part_tells_does_not_count_as_done() -> None:
    engine = object.__new__(InProcessEngine)
    slow = Slow()
    engine.use([Talks(), slow])
    engine.have_done(ProfileSteps(1))
    assert not slow.num_asked
