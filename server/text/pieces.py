"""What generated text turns into on its way to a client: content, reasoning, tool calls; and the routers that sort it.

A router takes text as it comes and gives it back sorted. It holds back what it cannot yet decide, and `flush` gives all
of that back. Joining everything a router gave must not depend on how its input was cut.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one tool call. The first delta of an index carries `call_id` and `name`; later ones only arguments."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Sorted output text; empty parts mean nothing new."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: "TextPieces") -> "TextPieces":
        return TextPieces(
            self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls
        )


NO_TEXT = TextPieces()


class TextRouter(Protocol):
    """Sorts one choice's text as it streams in."""

    def push(self, text: str) -> TextPieces:
        """Take more text; give what is decided."""

    def flush(self) -> TextPieces:
        """The text has ended: give the rest. Unfinished structures come back as content."""
