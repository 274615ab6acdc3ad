"""The HTTP answer to a generation: one JSON object, or server-sent events.

Knows framing, headers and disconnects; the content comes as chunks. An event's JSON is a fixed envelope around what
changed, so that a token costs no model object.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.config import ServerConfig
from server.errors import told
from server.middleware import CLIENT_CLOSED
from server.openai.explain import CACHE_EXPLAIN
from server.openai.fold import Fold, best_of
from server.openai.generation import Generation
from server.openai.plan import Plan, StreamStyle
from server.openai.usage import server_timing, usage
from server.openai.wire import Chunk, WireForm
from server.state import Served

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Line ends to some clients' line readers, though not to SSE.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def compact_json(value: Any) -> str:
    """JSON text on one line, whatever is taken for a line end."""
    text = _dumps(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def answer_head(plan: Plan, form: WireForm, served: Served, kind: str) -> dict[str, Any]:
    """The fields every chunk of an answer has in common, and the whole answer too."""
    return {
        "id": form.id_prefix + secrets.token_hex(16),
        "object": kind,
        "created": int(time.time()),
        "model": plan.model,
        "system_fingerprint": served.fingerprint,
    }


async def respond(request: Request, generation: Generation, served: Served, config: ServerConfig) -> Response:
    """The answer, whole or as a stream. Closes the generation however it ends.

    Raises:
        ApiError, SchedulerError: it failed before the first byte was sent.
    """
    style = generation.plan.stream
    if style is None:
        return await _whole(request, generation, served)
    return await _stream(request, generation, Envelope(generation, served, style), config)


async def _whole(request: Request, generation: Generation, served: Served) -> Response:
    head = answer_head(generation.plan, generation.form, served, generation.form.whole_object)
    with generation:
        body = await unless_gone(request, folded(generation, head))
    if body is None:
        return Response(status_code=CLIENT_CLOSED)
    headers = {"Server-Timing": server_timing(body.pop("timings"))}
    return Response(compact_json(body), headers=headers, media_type="application/json")


async def folded(generation: Generation, head: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, with its `timings`. Raises what `Generation.chunks` raises."""
    plan = generation.plan
    fold = Fold(has_logprobs=plan.output.logprobs is not None)
    async for chunk in generation.chunks():
        fold.add(chunk)
    choices = fold.choices()
    if plan.num_drawn > plan.output.num_choices:
        choices = best_of(choices, generation.choices, plan.output.num_choices)
    return {**head, "choices": choices, **fold.fields}


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Envelope:
    """Writes chunks as events of one stream."""

    def __init__(self, generation: Generation, served: Served, style: StreamStyle) -> None:
        head = answer_head(generation.plan, generation.form, served, generation.form.chunk_object)
        self._generation = generation
        self._style = style
        self._prefix = f'data: {compact_json(head)[:-1]},"choices":['
        self._null_usage = ',"usage":null' if style.include_usage else ""

    def event(self, chunk: Chunk) -> bytes:
        """The bytes of one event; none for a usage that nobody asked for."""
        fields = chunk.fields
        if not chunk.choices and not self._style.include_usage:
            fields = {name: value for name, value in fields.items() if name == CACHE_EXPLAIN}
            if not fields:
                return b""
        text = self._prefix + ",".join(map(compact_json, chunk.choices)) + "]"
        if chunk.choices:
            text += self._usage()
            if self._style.obfuscate:
                text += f',"obfuscation":"{secrets.token_urlsafe(32)[: 1 + secrets.randbelow(32)]}"'
        if fields:
            text += "," + compact_json(fields)[1:-1]
        return (text + "}\n\n").encode()

    def _usage(self) -> str:
        if self._style.continuous_usage:
            return f',"usage":{compact_json(usage(self._generation))}'
        return self._null_usage


async def _stream(request: Request, generation: Generation, envelope: Envelope, config: ServerConfig) -> Response:
    """Begin the stream with its first chunk, so that what fails before it still gets a proper status.

    It begins without one when that takes longer than a keep-alive interval: then silence would be worse.
    """
    chunks = generation.chunks()
    with ExitStack() as undo:
        undo.enter_context(generation)
        first = asyncio.ensure_future(anext(chunks))
        undo.callback(first.cancel)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            limit_s = config.sse_keep_alive_interval
            await asyncio.wait({first, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if gone.done() and not first.done():
            return Response(status_code=CLIENT_CLOSED)
        if first.done():
            first.result()
        undo.pop_all()
    request_id: str = request.scope["quire"].request_id
    return StreamAnswer(_ended(_events(first, chunks, envelope), generation, request_id), generation, config)


async def _events(
    first: "asyncio.Future[Chunk]", chunks: AsyncGenerator[Chunk, None], envelope: Envelope
) -> AsyncGenerator[bytes, None]:
    yield envelope.event(await first)
    async for chunk in chunks:
        event = envelope.event(chunk)
        if event:
            yield event


async def _ended(
    events: AsyncGenerator[bytes, None], generation: Generation, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events, then `[DONE]`; whatever goes wrong in a begun stream is its last event but one."""
    try:
        with generation:
            async for event in events:
                yield event
    except Exception as error:  # noqa: BLE001  the status is sent: a client told nothing would wait for more
        yield f"data: {json.dumps(told(error, request_id).body())}\n\n".encode()
    yield DONE


class StreamAnswer(EventSourceResponse):
    """A stream that closes its generation however it ends, even when it never began."""

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation, config: ServerConfig) -> None:
        super().__init__(
            events,
            headers=STREAM_HEADERS,
            ping=config.sse_keep_alive_interval,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive"),
            sep="\n",
            # A server that is told to stop lets its streams end; without this they would be cut at once.
            shutdown_grace_period=config.shutdown_timeout,
        )
        # Whether a connection is kept is between the client and the HTTP server.
        del self.headers["connection"]
        self._generation = generation

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Just send: no send has a time limit here, so none pays for watching one."""
        await send(message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
