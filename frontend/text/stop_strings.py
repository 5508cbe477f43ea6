"""Finds stop strings in a stream of text pieces, however the text is cut."""

from collections import deque


class StopStrings:
    """The automaton of Aho and Corasick over a request's stop strings; all its sequences share it.

    A state stands for the longest end of the text so far that is a beginning of a stop string. So a character costs the
    same however many stop strings there are.
    """

    __slots__ = ("begins", "depths", "failures", "found", "include_stop", "steps")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self.include_stop = include_stop
        self.steps: list[dict[str, int]] = [{}]  # from each state, by the next character; state 0 is the beginning
        self.depths = [0]  # the number of characters that each state stands for
        self.found = [""]  # the longest stop string that ends in each state
        for stop in stops:
            self._add(stop)
        self.failures = [0] * len(self.steps)  # the state of the longest end that another stop string begins with
        self._link()
        self.begins = frozenset(self.steps[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.steps[state].get(character)
            if following is None:
                following = self.steps[state][character] = len(self.steps)
                self.steps.append({})
                self.depths.append(self.depths[state] + 1)
                self.found.append("")
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Set the failures, of short states first."""
        steps, failures, found = self.steps, self.failures, self.found
        waiting = deque(steps[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in steps[state].items():
                failure = failures[state]
                while failure and character not in steps[failure]:
                    failure = failures[failure]
                failure = failures[following] = steps[failure].get(character, 0)
                found[following] = found[following] or found[failure]
                waiting.append(following)


class StopMatcher:
    """Finds the stop string that is complete first in one text, and holds back text that may become one.

    If several stop strings end at the same character, the longest (which begins first) wins.
    """

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns the text that may be shown now, and the stop string that is complete, if any. In that case the rest of
        the text is dropped, and `feed` must not be called again.
        """
        stops, state = self._stops, self._state
        if not state and stops.begins.isdisjoint(text):
            return text, None
        steps, failures, found = stops.steps, stops.failures, stops.found
        known = self._held + text
        for position in range(len(self._held), len(known)):
            character = known[position]
            while state and character not in steps[state]:
                state = failures[state]
            state = steps[state].get(character, 0)
            if stop := found[state]:
                self._held, self._state = "", 0
                end = position + 1
                return known[: end if stops.include_stop else end - len(stop)], stop
        shown = len(known) - stops.depths[state]
        self._held, self._state = known[shown:], state
        return known[:shown], None

    def flush(self) -> str:
        """The text held back, once it is certain that no more comes."""
        held, self._held, self._state = self._held, "", 0
        return held
