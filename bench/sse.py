"""From the bytes of an HTTP answer, each with the moment it came, to a `Record`.

Works on what was kept, after the load has ended, so that parsing costs the measured time nothing. Knows HTTP/1.1
framing, server-sent events and the two shapes of OpenAI chunks; knows no sockets.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.figures import Record

END_OF_CHUNKS = b"\r\n0\r\n\r\n"
"""Cannot stand inside an event: JSON escapes line ends."""
HEAD_END = b"\r\n\r\n"


@dataclass(slots=True)
class Exchange:
    """One request's answer, raw: (seconds, bytes) as they came. `failure` is set when the connection broke."""

    due_s: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Status and how the body's end is told: chunked, after `length` bytes, or (neither) by closing."""

    status: int
    is_chunked: bool
    length: int | None


def parse_head(head: bytes) -> Head:
    """The status line and headers, without the empty line that ends them."""
    first, *lines = head.split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    length = headers.get(b"content-length")
    is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
    return Head(int(first.split(b" ", 2)[1]), is_chunked, None if length is None else int(length))


class ChunkReader:
    """Takes HTTP chunks out of a stream of bytes, however the bytes are cut."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """The bodies of all chunks that are complete by now."""
        self._buffer += data
        bodies = []
        while True:
            line_end = self._buffer.find(b"\r\n")
            if line_end < 0:
                break
            size = int(self._buffer[:line_end].split(b";")[0], 16)
            end = line_end + 2 + size
            if len(self._buffer) < end + 2:
                break
            bodies.append(self._buffer[line_end + 2 : end])
            self._buffer = self._buffer[end + 2 :]
        return b"".join(bodies)


def timed_events(pieces: Sequence[tuple[float, bytes]], is_chunked: bool) -> Iterator[tuple[float, str]]:
    """The data of each event and when its last byte came; comments and other fields are left out."""
    reader, buffer = ChunkReader(), b""
    for moment_s, data in pieces:
        buffer += reader.feed(data) if is_chunked else data
        *events, buffer = buffer.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield moment_s, b"\n".join(lines).decode()


def record_of(exchange: Exchange) -> Record:
    """What an exchange says; whatever is wrong with it becomes the record's `error`."""
    if exchange.failure is not None:
        return Record(exchange.due_s, exchange.ended_s, error=exchange.failure)
    head, pieces = _split_head(exchange.pieces)
    if head.status != 200:
        body = b"".join(data for _, data in pieces)
        text = (ChunkReader().feed(body) if head.is_chunked else body).decode(errors="replace")
        return Record(exchange.due_s, exchange.ended_s, error=f"status {head.status}: {text[:300]}")
    return _read_stream(exchange, timed_events(pieces, head.is_chunked))


def _split_head(pieces: Sequence[tuple[float, bytes]]) -> tuple[Head, list[tuple[float, bytes]]]:
    """The head, and the body's bytes with their moments."""
    front = b""
    for number, (moment_s, data) in enumerate(pieces):
        front += data
        head, mark, rest = front.partition(HEAD_END)
        if mark:
            return parse_head(head), [(moment_s, rest), *pieces[number + 1 :]]
    raise ValueError("an answer without the end of its head")


def _read_stream(exchange: Exchange, events: Iterator[tuple[float, str]]) -> Record:
    moments: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for moment_s, data in events:
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            return Record(exchange.due_s, exchange.ended_s, error=str(event["error"])[:300])
        usage = event.get("usage") or usage
        text = "".join(map(content_of, event.get("choices", ())))
        if text:
            moments.append(moment_s)
            texts.append(text)
    details = usage.get("prompt_tokens_details") or {}
    return Record(
        due_s=exchange.due_s,
        ended_s=exchange.ended_s,
        first_s=moments[0] if moments else None,
        gaps_s=tuple(after - before for before, after in pairwise(moments)),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", len(moments)),
        num_cached_tokens=details.get("cached_tokens") or 0,
        text="".join(texts),
        error=None if moments else "an answer without content",
    )


def content_of(choice: dict[str, Any]) -> str:
    """The text that a completion's or a chat's choice brings, reasoning included."""
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or part.get("reasoning_content") or ""
