"""What gates share whose worker has room for so many things: requests that find none are held in turn."""

from collections import deque

from penstock.core.scheduling.part import Gate
from penstock.core.scheduling.trials import Suspect, Trials
from penstock.core.sequences.sequence import Request
from penstock.core.sequences.waiting_queue import WaitingQueue


class RoomGate(Gate):
    """Numbers what the worker is asked for, and holds who must wait for room or for a trial."""

    __slots__ = ("_holds_for_trial", "_no_room", "_num_made", "_unanswered")

    def __init__(self, waiting: WaitingQueue, trials: Trials) -> None:
        super().__init__(waiting, trials)
        self._unanswered: set[int] = set()  # the worker may make them, even if they were dropped meanwhile
        self._num_made = 0  # ids are never reused
        self._no_room: deque[Request] = deque()  # held without what they need; some may have left since
        self._holds_for_trial = False  # some of those, perhaps all, are not held for lack of room
        trials.at_end.append(self._trial_ended)

    @property
    def num_in_making(self) -> int:
        return len(self._unanswered)

    def _ask(self) -> int:
        """The id of what the worker is asked for next; it owes an answer."""
        self._num_made += 1
        self._unanswered.add(self._num_made)
        return self._num_made

    def _must_wait(self, key: Suspect) -> bool:
        """Whether this may not be asked for now, because a suspect is made alone, or this is to be."""
        return self.trials.current is not None or (self.trials.is_suspected(key) and self.num_in_making > 0)

    def _hold(self, request: Request, why: str, *, for_trial: bool) -> None:
        """Hold a request until there is room, or until a trial ends."""
        self._holds_for_trial |= for_trial
        self._no_room.append(request)
        self._waiting.hold(request, why)

    def _ask_again(self) -> None:
        """Let those ask again that were held because a suspect was made alone, or was to be."""
        if not self._holds_for_trial or self.trials.current is not None or self.num_in_making:
            return
        self._holds_for_trial = False
        while self._no_room:  # each goes to the head of its line
            self._waiting.release(self._no_room.pop())

    def _trial_ended(self) -> None:
        """Nothing is on trial any more, or the worker is another one."""
        self._ask_again()

    def _forget_worker(self) -> None:
        """The worker is gone, with all that it was asked for."""
        self._unanswered.clear()
        self._no_room.clear()
        self._holds_for_trial = False
        self.messages.clear()
