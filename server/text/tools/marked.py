"""Calls as JSON objects between an opening and a closing marker, as Hermes and Qwen models write them; the router.

Knows: `<tool_call>{...}</tool_call>` and how it may go wrong. Refuses to know: prompts and grammars.
"""

from collections.abc import Sequence

from server.text.tools.dialect import IdSource, Tool
from server.text.tools.envelope import CallEnvelope
from server.text.tools.router import PhasedRouter
from server.text.tools.scan import Status, held_suffix


class MarkedRouter(PhasedRouter):
    """Finds `open {call} close` in text. A missing or half closing marker does not undo a complete call."""

    def __init__(self, tools: Sequence[Tool], new_id: IdSource, open_marker: str, close_marker: str) -> None:
        super().__init__(tools, new_id)
        self._open = open_marker
        self._close = close_marker
        self._raw = ""
        self._call = self._envelope()

    def _envelope(self) -> CallEnvelope:
        return CallEnvelope(self._names, self._begin_call, self._argue)

    def _content(self) -> bool:
        before, marker, after = self._buffer.partition(self._open)
        if marker:
            self._say(before)
            self._buffer = after
            self._raw = marker
            self._call = self._envelope()
            self._phase = self._inside
            return True
        held = 0 if self._ended else held_suffix(self._buffer, (self._open,))
        decided = len(self._buffer) - held
        self._say(self._buffer[:decided])
        self._buffer = self._buffer[decided:]
        return False

    def _inside(self) -> bool:
        used = self._call.feed(self._buffer)
        self._raw += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if self._call.status is Status.OPEN:
            return False
        if self._call.begun:
            self._phase = self._closing
        else:
            self._not_a_call()
        return True

    def _closing(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self._close):
            self._buffer = rest[len(self._close) :]
        elif self._close.startswith(rest):
            if self._ended:
                self._buffer = ""
            return False
        self._phase = self._content
        return True

    def _not_a_call(self) -> None:
        self._say(self._raw)
        self._raw = ""
        self._phase = self._content

    def _give_up(self) -> None:
        if self._phase == self._inside and not self._call.begun:
            self._not_a_call()
