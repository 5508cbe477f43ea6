"""Finds stop strings in a stream of text pieces, however the text is cut."""

from array import array

_CHARACTER_BITS = 21
"""Bits of a character's number."""
_NO_CHARACTER = (1 << _CHARACTER_BITS) - 1


class StopStrings:
    """The automaton of Aho and Corasick over a request's stop strings; all its sequences share it.

    A state stands for the longest end of the text so far that is a beginning of a stop string; state 0 is the empty
    one. So a character costs the same however many stop strings there are. States are numbered along each stop string:
    a step nearly always leads to the next number, and is one number in memory, because a request that waits for hours
    holds all of them.
    """

    __slots__ = ("_branches", "_failures", "_found", "_stops", "_straight", "begins", "depths", "include_stop")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self.include_stop = include_stop
        self.begins = frozenset(stop[0] for stop in stops)
        self.depths = array("I", [0])  # the number of characters that each state stands for
        self._stops = ("", *stops)
        self._straight = array("I", [_NO_CHARACTER])  # the character with which a state becomes the next one
        self._branches: dict[int, int] = {}  # by state and character: all other steps
        self._found = array("I", [0])  # the longest stop string that ends in each state, by its place among them
        parents, characters = array("I", [0]), array("I", [0])
        for place, stop in enumerate(self._stops):
            state = 0
            for character in map(ord, stop):
                following = self._step(state, character)
                if not following:
                    following = len(self.depths)
                    if following == state + 1:
                        self._straight[state] = character
                    else:
                        self._branches[state << _CHARACTER_BITS | character] = following
                    self.depths.append(self.depths[state] + 1)
                    self._straight.append(_NO_CHARACTER)
                    self._found.append(0)
                    parents.append(state)
                    characters.append(character)
                state = following
            self._found[state] = place
        self._failures = array("I", bytes(4 * len(parents)))  # the longest end that another stop string begins with
        for state in sorted(range(1, len(parents)), key=self.depths.__getitem__):
            if parent := parents[state]:
                failure = self._failures[state] = self.after(self._failures[parent], characters[state])
                self._found[state] = self._found[state] or self._found[failure]

    def _step(self, state: int, character: int) -> int:
        if self._straight[state] == character:
            return state + 1
        return self._branches.get(state << _CHARACTER_BITS | character, 0)

    def after(self, state: int, character: int) -> int:
        """The state that a state becomes with a character, given by its number."""
        while not (following := self._step(state, character)) and state:
            state = self._failures[state]
        return following

    def found(self, state: int) -> str:
        """The longest stop string that ends in a state; empty if there is none."""
        return self._stops[self._found[state]]


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
        known = self._held + text
        for position in range(len(self._held), len(known)):
            state = stops.after(state, ord(known[position]))
            if stop := stops.found(state):
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
