"""An answer that is either tool calls or content: its beginning tells, nothing behind it counts.

Knows: what calls open with. Refuses to know: how they go on.
"""

from server.text.pieces import TextPieces, TextRouter


class LeadingRouter:
    """Gives the answer to `calls` when it begins with `opening` (white space aside); else all of it is content."""

    def __init__(self, opening: str, calls: TextRouter) -> None:
        self._opening = opening
        self._calls = calls
        self._buffer = ""
        self._is_decided = False
        self._are_calls = False

    def push(self, text: str) -> TextPieces:
        """Take more text; give what is decided."""
        if not self._is_decided:
            self._buffer += text
            start = self._buffer.lstrip()
            self._are_calls = start.startswith(self._opening)
            self._is_decided = self._are_calls or not self._opening.startswith(start)
            text, self._buffer = (self._buffer, "") if self._is_decided else ("", self._buffer)
        return self._calls.push(text) if self._are_calls else TextPieces(content=text)

    def flush(self) -> TextPieces:
        """The text has ended: give the rest."""
        return self._calls.flush() if self._are_calls else TextPieces(content=self._buffer)
