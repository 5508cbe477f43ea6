"""Finds stop strings in a stream of text pieces, however the text is cut."""


class StopMatcher:
    """Finds the stop string that is complete first, and holds back text that may become one.

    There is one Knuth-Morris-Pratt automaton per stop string, fed character by character. Its state is the length of
    the longest suffix of the text so far that is a prefix of the stop string. Hence the result does not depend on how
    the text is cut, a character costs O(number of stop strings), and the text to hold back is exactly the longest
    state. If several stop strings end at the same character, the longest (which begins first) wins.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._failure = tuple(_failure_function(stop) for stop in stops)
        self._states = [0] * len(stops)
        self._held = ""
        self._include_stop = include_stop

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns the text that may be shown now, and the stop string that is complete, if any. In that case the rest of
        the text is dropped, and `feed` must not be called again.
        """
        if not self._held and not any(stop[0] in text for stop in self._stops):
            return text, None
        known = self._held + text
        states = self._states
        for position in range(len(self._held), len(known)):
            character = known[position]
            longest: str | None = None
            for index, stop in enumerate(self._stops):
                state = states[index]
                while state and stop[state] != character:
                    state = self._failure[index][state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    if longest is None or len(stop) > len(longest):
                        longest = stop
                    state = self._failure[index][state - 1]
                states[index] = state
            if longest is not None:
                self._held = ""
                end = position + 1
                return known[: end if self._include_stop else end - len(longest)], longest
        num_held = max(states)
        shown = len(known) - num_held
        self._held = known[shown:]
        return known[:shown], None

    def flush(self) -> str:
        """The text held back, once it is certain that no more comes."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure_function(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = failure[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        failure[position] = length
    return tuple(failure)
