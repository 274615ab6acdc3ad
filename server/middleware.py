"""What happens to every request around its route, as plain ASGI: HEAD, id and accounting, body limit, API key.

From the outside in: `HeadAsGet`, `Accounting`, (CORS, then faults of ours), `BodyLimit`, `ApiKey`. Knows headers and
scopes; refuses to know bodies and models. Each reads the `RequestContext` that `Accounting` puts into the scope under
"quire".
"""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError
from server.limits import Account
from server.logs import log_access
from server.state import ServerState

CLIENT_CLOSED = 499
"""Counted, never sent: the client left before any answer began."""

PROTECTED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")
"""Paths, with everything below them, that ask for the API key."""

_UNSAFE_ID = re.compile(r"[^\x21-\x7e]")
MAX_REQUEST_ID = 128


@dataclass(slots=True)
class RequestContext:
    """What is known of one request beside its body.

    Attributes:
        account: whose key was used.
        finish_reason: of the answer, for the counter; "none" where nothing was generated.
        status: the status sent; None before.
        headers: added to whatever answer is sent.
    """

    request_id: str
    account: Account
    finish_reason: str = "none"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


class HeadAsGet:
    """HEAD works where GET does: the route runs as GET, the body is dropped."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Accounting:
    """Gives each request an id, puts it on the answer, and counts the request once when it has ended."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(request_id_of(Headers(scope=scope)), self._state.keys.anonymous)
        scope["quire"] = context
        began_s = time.monotonic()

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.request_id
                for name, value in context.headers.items():
                    headers[name] = value
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        except asyncio.CancelledError:
            context.status = context.status or CLIENT_CLOSED
            raise
        finally:
            # No answer and no cancellation: an exception of ours is on its way out, and becomes a 500.
            status = context.status or 500
            endpoint = endpoint_of(scope)
            self._state.metrics.request_ended(endpoint, status, context.finish_reason, context.account.name)
            log_access(context.request_id, scope["method"], endpoint, status, time.monotonic() - began_s)


def endpoint_of(scope: Scope) -> str:
    """The template of the route that was found; "unknown" for none, so that no client can make up labels."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    # The documentation's routes say nothing of themselves; without parameters, a path is its own template.
    return scope["path"] if "endpoint" in scope and not scope.get("path_params") else "unknown"


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own `x-request-id` without anything that has no place in a header or log, or a fresh one."""
    given = _UNSAFE_ID.sub("", headers.get("x-request-id", ""))[:MAX_REQUEST_ID]
    return given or f"req-{uuid.uuid4().hex}"


class BodyLimit:
    """Refuses a body above the limit: by its Content-Length at once, else while it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"The body is larger than the {self._max_bytes} bytes this server takes."
        # The rest of the body was never read, so this connection can carry no further request.
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class ApiKey:
    """Asks for a key on protected paths when any is set, and notes whose it is."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._keys = state.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._keys.asks_for_keys and is_protected(scope["path"]):
            account = self._keys.find(key_of(Headers(scope=scope)))
            if account is None:
                await self._unauthorized().response()(scope, receive, send)
                return
            scope["quire"].account = account
        await self._app(scope, receive, send)

    def _unauthorized(self) -> ApiError:
        message = "Missing or wrong API key. Send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def is_protected(path: str) -> bool:
    """Whether `path` asks for the key."""
    return any(path == prefix or path.startswith(prefix + "/") for prefix in PROTECTED)


def key_of(headers: Headers) -> str:
    """The key a request carries; empty when none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "")
