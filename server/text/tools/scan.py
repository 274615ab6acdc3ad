"""Reading JSON that is still being written: where a value ends, and whether what came so far can be valid.

Knows: RFC 8259 character by character. Refuses to know: tools, what the value means.
"""

import re
from collections.abc import Iterable
from enum import Enum

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


class Status(Enum):
    """How far a value has come."""

    OPEN = "more text is needed"
    DONE = "complete"
    BAD = "cannot become valid any more"


class JsonScanner:
    """Follows one JSON value from its first character; never looks behind its end.

    A number standing alone is refused, because only the text after it would tell its end.
    """

    def __init__(self) -> None:
        self.status = Status.OPEN
        self._nesting: list[str] = []
        self._state = "value"
        self._word = ""

    def feed(self, text: str, start: int = 0) -> int:
        """Take `text[start:]`; give where reading stopped: behind the value, at the bad character, or at the end."""
        position = start
        while position < len(text) and self.status is Status.OPEN:
            if self._state == "string":
                position = self._in_string(text, position)
            elif self._step(text[position]):
                position += 1
        return position

    def _step(self, char: str) -> bool:
        """Take one character; False when it must be read again or is bad."""
        if self._word:
            return self._in_word(char)
        if self._state == "escape":
            return self._escape(char)
        if self._state.startswith("hex"):
            return self._hex(char)
        if char in _SPACE and self._nesting:
            return True
        return self._structure(char)

    def _structure(self, char: str) -> bool:
        if self._state in ("value", "value or end") and not (char == "]" and self._state == "value or end"):
            return self._begin(char)
        if self._state in ("key", "key or end") and char == '"':
            self._state = "string"
            self._nesting.append("key")
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "comma or end" and char == ",":
            self._state = "key" if self._nesting[-1] == "{" else "value"
        elif self._closes(char):
            self._nesting.pop()
            self._end_value()
        else:
            return self._bad()
        return True

    def _closes(self, char: str) -> bool:
        can_end = self._state in ("comma or end", "key or end", "value or end")
        return can_end and (self._nesting[-1], char) in (("{", "}"), ("[", "]"))

    def _begin(self, char: str) -> bool:
        if char == "{":
            self._nesting.append("{")
            self._state = "key or end"
        elif char == "[":
            self._nesting.append("[")
            self._state = "value or end"
        elif char == '"':
            self._state = "string"
        elif char in _LITERALS or (self._nesting and char in "-0123456789"):
            self._word = char
        else:
            return self._bad()
        return True

    def _in_string(self, text: str, position: int) -> int:
        match = _PLAIN.match(text, position)
        assert match is not None, "the pattern matches the empty text too"
        position = match.end()
        if position == len(text):
            return position
        if text[position] == '"':
            if self._nesting and self._nesting[-1] == "key":
                self._nesting.pop()
                self._state = "colon"
            else:
                self._end_value()
        elif text[position] == "\\":
            self._state = "escape"
        else:
            self._bad()
            return position
        return position + 1

    def _escape(self, char: str) -> bool:
        if char == "u":
            self._state = "hex4"
        elif char in '"\\/bfnrt':
            self._state = "string"
        else:
            return self._bad()
        return True

    def _hex(self, char: str) -> bool:
        if char not in _HEX:
            return self._bad()
        left = int(self._state[3:]) - 1
        self._state = f"hex{left}" if left else "string"
        return True

    def _in_word(self, char: str) -> bool:
        literal = _LITERALS.get(self._word[0])
        if literal is None:
            if char in _NUMBER_CHARS:
                self._word += char
                return True
            return self._end_number()
        self._word += char
        if not literal.startswith(self._word):
            return self._bad()
        if self._word == literal:
            self._word = ""
            self._end_value()
        return True

    def _end_number(self) -> bool:
        """The number ended one character ago: check it, and have that character read again."""
        if _NUMBER.fullmatch(self._word) is None:
            return self._bad()
        self._word = ""
        self._end_value()
        return False

    def _end_value(self) -> None:
        if self._nesting:
            self._state = "comma or end"
        else:
            self.status = Status.DONE

    def _bad(self) -> bool:
        self.status = Status.BAD
        return False


def held_suffix(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` could be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
