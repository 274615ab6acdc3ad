"""What all tool-call routers share: a buffer, phases that eat from it, and rules for the text around calls.

Rules, the same however the text was cut:
- a call is reported once its name is a declared tool and its arguments begin; what was reported stands, so a call cut
  short keeps its partial arguments;
- what turns out not to be a call before that point is content, marker included;
- white space next to a call is not content.
"""

from collections.abc import Callable, Sequence

from server.text.pieces import TextPieces, ToolCallDelta
from server.text.tools.dialect import IdSource, Tool

Phase = Callable[[], bool]
"""Eats what it can decide from the buffer; True to run the (perhaps new) phase again, False to wait for more text."""


class PhasedRouter:
    """A router that is always in one phase; subclasses define phases and set the first one."""

    def __init__(self, tools: Sequence[Tool], new_id: IdSource) -> None:
        self._names = frozenset(tool.name for tool in tools)
        self._new_id = new_id
        self._buffer = ""
        self._ended = False
        self._pieces = TextPieces()
        self._space = ""
        self._after_call = False
        self._num_calls = 0
        self._phase: Phase = self._content

    def push(self, text: str) -> TextPieces:
        """Take more text; give what is decided."""
        self._buffer += text
        while self._buffer and self._phase():
            pass
        return self._take()

    def flush(self) -> TextPieces:
        """The text has ended: give the rest. Unfinished calls that were not reported come back as content."""
        self._ended = True
        while self._buffer and self._phase():
            pass
        self._give_up()
        if not self._after_call and self._space:
            self._pieces += TextPieces(content=self._space)
            self._space = ""
        return self._take()

    def _content(self) -> bool:
        """The phase outside calls; here, everything is content."""
        self._say(self._buffer)
        self._buffer = ""
        return False

    def _give_up(self) -> None:
        """The text ended inside a call: return what was not reported as content."""

    def _take(self) -> TextPieces:
        pieces, self._pieces = self._pieces, TextPieces()
        return pieces

    def _say(self, text: str) -> None:
        """Content; white space at its end waits until it is known what follows."""
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._pieces += TextPieces(content=self._space + body)
            self._space = text[len(body) :]
            self._after_call = False
        elif not self._after_call:
            self._space += text

    def _begin_call(self, name: str) -> None:
        self._space = ""
        self._after_call = True
        delta = ToolCallDelta(self._num_calls, self._new_id(), name)
        self._num_calls += 1
        self._pieces += TextPieces(tool_calls=(delta,))

    def _argue(self, text: str) -> None:
        self._pieces += TextPieces(tool_calls=(ToolCallDelta(self._num_calls - 1, arguments=text),))
