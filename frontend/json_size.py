"""How large a JSON text would be as objects, told without making any: the number of its values, and its depth.

A body of a few megabytes may hold millions of values; to make objects of them, walk and free them takes seconds, in
which an event loop serves nobody. Here the text is looked through as it comes, by the interpreter's own loops over
bytes (about a millisecond a megabyte), up to the first value that is too many.

What is no JSON is not noticed; a decoder that stops at the first mistake makes no more objects than were counted.
"""

from itertools import accumulate

MAX_DEPTH = 128
"""Lists and objects within each other."""

MAX_VALUES = 65_536
"""Lists, objects and texts (names of an object's members included)."""

MAX_PLAIN_VALUES = 262_144
"""Numbers, true, false and null: a batch of prompts may come as token ids."""

PIECE_BYTES = 256 << 10
"""In which a long text should be fed."""

MAX_DIGITS = 128
"""In a row: the time to read a number grows with the square of its length."""

MAX_EXPONENTS = 1024
"""Numbers such as 1e-300: reading one may take twenty microseconds, a hundred times as long as others."""

_OPEN, _CLOSE = b"[{", b"]}"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPEN + _CLOSE))
_AS_ZEROS = bytes(ord("0") if byte in b"123456789" else byte for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_STEPS = [(byte in _OPEN) - (byte in _CLOSE) for byte in range(256)]


class TooManyValuesError(ValueError):
    """A text has more values, or more levels, than it may have; the message says which, and the limit."""


class JsonSize:
    """Counts one text, which comes in pieces; after `begin` another one, added to the first."""

    def __init__(self, max_plain_values: int = MAX_PLAIN_VALUES) -> None:
        self._max_plain_values = max_plain_values
        self._num_lists = 0
        self._num_quotes = 0
        self._num_separators = 0
        self._num_exponents = 0
        self.begin()

    @property
    def num_values(self) -> int:
        """Lists, objects and texts, names included."""
        return self._num_lists + self._num_quotes // 2

    def begin(self) -> None:
        """What comes next is another text."""
        self._num_quotes += self._num_quotes % 2
        self._is_escaped = False  # the last piece ended within an escape
        self._depth = 0
        self._last = b""  # the end of the last piece, as far as it is digits

    def feed_all(self, text: bytes) -> None:
        """A long text, piece by piece; raises as `feed` does."""
        for begin in range(0, len(text), PIECE_BYTES):
            self.feed(text[begin : begin + PIECE_BYTES])

    def feed(self, piece: bytes) -> None:
        """The next piece of the text; 256 KiB take less than ten milliseconds.

        Raises:
            TooManyValuesError: with it, the text is too large.
        """
        if self._is_escaped and piece:
            piece = piece[1:]
            self._is_escaped = False
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                self._is_escaped = True
                piece = piece[:-1]
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        # Now every quote begins or ends a text.
        is_in_string = self._num_quotes % 2
        self._num_quotes += piece.count(b'"')
        self._check()
        outside = b" ".join(piece.split(b'"')[is_in_string::2])
        self._check_numbers(outside)
        outside = outside.translate(None, _NOT_STRUCTURE)
        brackets = outside.translate(None, _NOT_BRACKETS)
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        self._num_lists += num_opened
        self._num_separators += len(outside) - len(brackets)
        self._check()
        if len(brackets) > self._depth + 2 * num_opened:
            return  # more is closed than was opened: no JSON, and nothing will be made of it
        levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._depth))
        self._depth = levels[-1]
        if max(levels) > MAX_DEPTH:
            raise TooManyValuesError(f"lists and objects may be nested {MAX_DEPTH} levels deep at most")

    def _check_numbers(self, outside: bytes) -> None:
        digits = self._last + outside.translate(_AS_ZEROS)
        if _LONG_NUMBER in digits:
            raise TooManyValuesError(f"numbers of at most {MAX_DIGITS} digits are taken")
        self._num_exponents += digits.count(b"0e") + digits.count(b"0E")
        if self._num_exponents > MAX_EXPONENTS:
            raise TooManyValuesError(f"at most {MAX_EXPONENTS} numbers with an exponent are taken")
        self._last = b"0" * (len(digits[-MAX_DIGITS:]) - len(digits[-MAX_DIGITS:].rstrip(b"0")))

    def _check(self) -> None:
        if self.num_values > MAX_VALUES:
            raise TooManyValuesError(f"at most {MAX_VALUES} lists, objects and texts (names included) are taken")
        if self._num_separators > MAX_VALUES + self._max_plain_values:
            raise TooManyValuesError(f"at most {self._max_plain_values} numbers are taken")
