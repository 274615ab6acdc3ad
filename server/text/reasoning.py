"""Reasoning sections in generated text: `<think>...</think>` goes to `reasoning`, the rest to content.

Knows: think tags, written by the model or already by the prompt. Refuses to know: tools, tokens, HTTP.

Rules, the same however the text was cut: only a section at the answer's very beginning counts (white space before it
aside); newlines right behind either tag belong to the tag; a section never closed stays reasoning to the end.
"""

from server.text.grammar_spec import ReasoningPrefix
from server.text.pieces import TextPieces, TextRouter
from server.text.tools.scan import held_suffix

OPEN = "<think>"
CLOSE = "</think>"


def reasoning_parsers() -> tuple[str, ...]:
    """The names that may be asked for, besides `auto`."""
    return ("think", "none")


def detect_reasoning(chat_template: str | None) -> str:
    """The parser for a chat template: `think` where it writes or strips think tags, else `none`."""
    return "think" if chat_template and CLOSE in chat_template else "none"


def prompt_opens_reasoning(parser: str, prompt: str) -> bool:
    """Whether a rendered prompt ends inside a reasoning section, so that the answer begins in it.

    Only an opening tag at the prompt's very end counts: history and instructions may hold tags too.
    """
    return parser == "think" and prompt.rstrip().endswith(OPEN)


def reasoning_prefix(parser: str, starts_inside: bool) -> ReasoningPrefix | None:
    """What a grammar has to let pass before the answer it constrains; None when the model does not reason."""
    return ReasoningPrefix(OPEN, CLOSE, starts_inside) if parser == "think" else None


def reasoning_router(parser: str, starts_inside: bool) -> TextRouter:
    """A router for one answer.

    Raises:
        ValueError: no parser has this name.
    """
    if parser == "none":
        return PlainRouter()
    if parser == "think":
        return ThinkRouter(starts_inside)
    raise ValueError(f"unknown reasoning parser {parser!r}; known are auto, {', '.join(reasoning_parsers())}")


def compose(first: TextRouter, second: TextRouter) -> TextRouter:
    """A router that gives the content of `first` to `second`; everything else passes."""
    return ComposedRouter(first, second)


class PlainRouter:
    """Everything is content."""

    def push(self, text: str) -> TextPieces:
        """The text, as content."""
        return TextPieces(content=text)

    def flush(self) -> TextPieces:
        """Nothing: nothing is ever held back."""
        return TextPieces()


class ThinkRouter:
    """`<think>` at the beginning opens, `</think>` closes, once."""

    def __init__(self, starts_inside: bool) -> None:
        self._buffer = ""
        self._state = "inside" if starts_inside else "before"
        self._trims = starts_inside

    def push(self, text: str) -> TextPieces:
        """Take more text; give what is decided."""
        self._buffer += text
        pieces = self._before() if self._state == "before" else TextPieces()
        if self._state == "inside":
            pieces += self._inside()
        return pieces + self._after() if self._state == "after" else pieces

    def flush(self) -> TextPieces:
        """The rest: a half-written tag is text of the section it stands in."""
        rest, self._buffer = self._buffer, ""
        return TextPieces(reasoning=rest) if self._state == "inside" else TextPieces(content=rest)

    def _before(self) -> TextPieces:
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._buffer = start[len(OPEN) :]
            self._state, self._trims = "inside", True
        elif not OPEN.startswith(start):
            self._state, self._trims = "after", False
        return TextPieces()

    def _inside(self) -> TextPieces:
        self._trim()
        reasoning, tag, rest = self._buffer.partition(CLOSE)
        if tag:
            self._buffer = rest
            self._state, self._trims = "after", True
            return TextPieces(reasoning=reasoning)
        held = held_suffix(self._buffer, (CLOSE,))
        decided = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(decided) :]
        return TextPieces(reasoning=decided)

    def _after(self) -> TextPieces:
        self._trim()
        content, self._buffer = self._buffer, ""
        return TextPieces(content=content)

    def _trim(self) -> None:
        """Drop newlines right behind a tag, however many pieces they come in."""
        if self._trims:
            self._buffer = self._buffer.lstrip("\n")
            self._trims = not self._buffer


class ComposedRouter:
    """Two routers in a row."""

    def __init__(self, first: TextRouter, second: TextRouter) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> TextPieces:
        """Text through both."""
        return self._onward(self._first.push(text))

    def flush(self) -> TextPieces:
        """The rest of the first through the second, then the second's own."""
        return self._onward(self._first.flush()) + self._second.flush()

    def _onward(self, pieces: TextPieces) -> TextPieces:
        sorted_out = self._second.push(pieces.content) if pieces.content else TextPieces()
        return TextPieces(reasoning=pieces.reasoning, tool_calls=pieces.tool_calls) + sorted_out
