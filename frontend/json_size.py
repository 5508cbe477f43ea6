"""Measures how large a JSON text would be as objects, without creating them: the number of its values, and its depth.

A body of a few megabytes may have millions of values. Creating, walking and freeing them as objects takes seconds, in
which an event loop serves no other request. Here the text is scanned as it arrives, with the interpreter's own loops
over bytes (about a millisecond per megabyte), and the scan stops at the first value beyond a limit.

Invalid JSON is not detected. A decoder that stops at the first mistake creates no more objects than were counted.
"""

from itertools import accumulate

MAX_DEPTH = 128
"""Nesting depth of lists and objects."""

MAX_VALUES = 65_536
"""Lists, objects and strings (including the names of an object's members)."""

MAX_PLAIN_VALUES = 262_144
"""Numbers, true, false and null: a batch of prompts may be sent as token ids."""

PIECE_BYTES = 256 << 10
"""Size of the pieces in which a long text should be fed."""

MAX_DIGITS = 128
"""Consecutive digits; the time to read a number grows with the square of its length."""

MAX_EXPONENTS = 1024
"""Numbers such as 1e-300; reading one may take twenty microseconds, a hundred times as long as others."""

MAX_ESCAPES = 524_288
"""Backslashes; a string full of escapes takes seven times as long to read as one without."""

_OPEN, _CLOSE = b"[{", b"]}"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPEN + _CLOSE))
_AS_ZEROS = bytes(ord("0") if byte in b"123456789" else byte for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_STEPS = [(byte in _OPEN) - (byte in _CLOSE) for byte in range(256)]


class TooManyValuesError(ValueError):
    """A text has too many values or levels; the message says which, and the limit."""


class JsonSize:
    """Counts one text that arrives in pieces. After `begin`, another text is added to the counts."""

    def __init__(self, max_plain_values: int = MAX_PLAIN_VALUES) -> None:
        self._max_plain_values = max_plain_values
        self._num_lists = 0
        self._num_quotes = 0
        self._num_separators = 0
        self._num_exponents = 0
        self._num_escapes = 0
        self.begin()

    @property
    def num_values(self) -> int:
        """Lists, objects and strings, names included."""
        return self._num_lists + self._num_quotes // 2

    def begin(self) -> None:
        """Start another text."""
        self._num_quotes += self._num_quotes % 2
        self._is_escaped = False  # the last piece ended within an escape
        self._depth = 0
        self._last = b""  # the digits at the end of the last piece

    def feed_all(self, text: bytes) -> None:
        """Feed a long text, piece by piece; raises as `feed` does."""
        for begin in range(0, len(text), PIECE_BYTES):
            self.feed(text[begin : begin + PIECE_BYTES])

    def feed(self, piece: bytes) -> None:
        """Feed the next piece of the text; 256 KiB take less than ten milliseconds.

        Raises:
            TooManyValuesError: the text is too large, including this piece.
        """
        if self._is_escaped and piece:
            piece = piece[1:]
            self._is_escaped = False
        if b"\\" in piece:
            self._num_escapes += piece.count(b"\\")
            if self._num_escapes > MAX_ESCAPES:
                raise TooManyValuesError(f"at most {MAX_ESCAPES} backslashes are allowed in its strings")
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                self._is_escaped = True
                piece = piece[:-1]
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        # Now every quote begins or ends a string.
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
            return  # more brackets close than were opened: invalid JSON, which will not be decoded
        levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._depth))
        self._depth = levels[-1]
        if max(levels) > MAX_DEPTH:
            raise TooManyValuesError(f"lists and objects may be nested at most {MAX_DEPTH} levels deep")

    def _check_numbers(self, outside: bytes) -> None:
        digits = self._last + outside.translate(_AS_ZEROS)
        if _LONG_NUMBER in digits:
            raise TooManyValuesError(f"numbers may have at most {MAX_DIGITS} digits")
        self._num_exponents += digits.count(b"0e") + digits.count(b"0E")
        if self._num_exponents > MAX_EXPONENTS:
            raise TooManyValuesError(f"at most {MAX_EXPONENTS} numbers with an exponent are allowed")
        self._last = b"0" * (len(digits[-MAX_DIGITS:]) - len(digits[-MAX_DIGITS:].rstrip(b"0")))

    def _check(self) -> None:
        if self.num_values > MAX_VALUES:
            raise TooManyValuesError(f"at most {MAX_VALUES} lists, objects and strings (names included) are allowed")
        if self._num_separators > MAX_VALUES + self._max_plain_values:
            raise TooManyValuesError(f"at most {self._max_plain_values} numbers are allowed")
