"""A lean HTTP/1.1 client on asyncio: sends prepared bytes, keeps every received piece with its moment, parses nothing.

The generator shares the machine with the server it measures, so a received piece costs it one list entry; `bench.sse`
reads them afterwards. One connection per running request, kept alive and reused. Knows sockets and the end of a body.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from bench.sse import END_OF_CHUNKS, HEAD_END, Exchange, Head, parse_head

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    is_tls: bool
    path: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> "Endpoint":
        """The endpoint that `url` names, such as `http://127.0.0.1:8000/v1/completions`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        is_tls = parts.scheme == "https"
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path or "/", headers)

    def request(self, body: Any) -> bytes:
        """The bytes of a POST of `body` as JSON."""
        content = json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + HEAD_END + content


class Connection(asyncio.Protocol):
    """One socket, one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._front = b""  # the head's bytes, until it is whole
        self._head: Head | None = None
        self._num_body_bytes = 0
        self._tail = b""  # the body's last bytes, to find the end of its chunks

    async def ask(self, request: bytes, due_s: float) -> Exchange:
        """Send `request` and keep what comes back until the answer ends or the connection breaks."""
        assert self._transport is not None, "not connected"
        assert self._exchange is None, "one exchange at a time"
        self._front, self._head, self._num_body_bytes, self._tail = b"", None, 0, b""
        exchange = self._exchange = Exchange(due_s)
        done = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await done
        finally:
            self._exchange = self._done = None
        return exchange

    def close(self) -> None:
        """Close the socket."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its type
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """asyncio's. The hot path: one call per received piece."""
        moment_s = clock()
        if self._exchange is None:  # nobody asked: not a server to trust with the next request
            self.close()
            return
        self._exchange.pieces.append((moment_s, data))
        if self._is_end(data):
            self._end(moment_s, None)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's. Only a body without length or chunks may end so."""
        self.is_open = False
        if self._exchange is not None:
            head = self._head
            is_end = error is None and head is not None and not head.is_chunked and head.length is None
            self._end(clock(), None if is_end else f"the connection broke: {error or 'closed by the server'}")

    def _is_end(self, data: bytes) -> bool:
        if self._head is None:
            self._front += data
            head, mark, data = self._front.partition(HEAD_END)
            if not mark:
                return False
            self._head = parse_head(head)
            self._tail = b"\r\n"
        if self._head.is_chunked:
            self._tail = (self._tail + data)[-len(END_OF_CHUNKS) :]
            return self._tail == END_OF_CHUNKS
        self._num_body_bytes += len(data)
        return self._head.length is not None and self._num_body_bytes >= self._head.length

    def _end(self, moment_s: float, failure: str | None) -> None:
        assert self._exchange is not None
        self._exchange.ended_s, self._exchange.failure = moment_s, failure
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests to one endpoint, over as many connections as run at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, due_s: float) -> Exchange:
        """One exchange; a kept connection that the server had closed meanwhile is replaced, once."""
        reused = self._take()
        if reused is not None:
            exchange = await reused.ask(request, due_s)
            if exchange.failure is None or exchange.pieces:
                return self._settle(reused, exchange)
        fresh = await self._connect()
        if isinstance(fresh, str):
            return Exchange(due_s, ended_s=clock(), failure=fresh)
        return self._settle(fresh, await fresh.ask(request, due_s))

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def _settle(self, connection: Connection, exchange: Exchange) -> Exchange:
        if connection.is_open:
            self._idle.append(connection)
        return exchange

    async def _connect(self) -> Connection | str:
        """A connection, or why there is none."""
        where = self._endpoint
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, where.host, where.port, ssl=True if where.is_tls else None
            )
        except OSError as error:
            return f"no connection: {error}"
        return connection
