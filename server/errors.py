"""Every error a client can see: one body shape, one table from exceptions to answers.

Knows statuses, OpenAI's error object and the Retry-After arithmetic. Knows no route and decides nothing: whoever finds
a fault raises, and the table says what the client is told.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.sampling.params import ParamError
from scheduler.errors import (
    ContextTooLong,
    Draining,
    EngineFailed,
    NeverFits,
    QueueFull,
    RequestRefused,
    SchedulerError,
    Unhealthy,
)
from server.text.own_template import OwnTemplateError
from server.text.structured import NUM_THREADS, CompilerBusy, GrammarError
from server.text.template import TemplateError

logger = logging.getLogger("quire.errors")

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Status -> `error.type`."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""SDKs obey a Retry-After of up to a minute and ignore a longer one."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Why there is no room now: shown in the error object, and as Retry-After.

    Attributes:
        reason: which bound was hit, in a word.
        queue_depth: how much of it is in use.
        limit: the bound.
        retry_after_s: computed wait; sent clamped to 1..60 s.
    """

    reason: str
    queue_depth: int
    limit: int
    retry_after_s: float

    @property
    def clamped_s(self) -> float:
        """The wait as it is sent, in seconds."""
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self.retry_after_s))

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds (rounded up) and `retry-after-ms`."""
        return {
            "Retry-After": str(math.ceil(self.clamped_s)),
            "retry-after-ms": str(math.ceil(self.clamped_s * 1000)),
        }

    def fields(self) -> dict[str, Any]:
        """The extra fields of the error object."""
        return {
            "reason": self.reason,
            "queue_depth": self.queue_depth,
            "limit": self.limit,
            "retry_after_s": round(self.clamped_s, 3),
        }


@dataclass
class ApiError(Exception):
    """An error as the client will see it. `code` is a string or None, `param` the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    busy: Busy | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code, ...}}`."""
        error = {
            "message": self.message,
            "type": ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | (self.busy.fields() if self.busy else {})}

    def response(self) -> Response:
        """The whole HTTP answer."""
        headers = dict(self.headers) | (self.busy.headers() if self.busy else {})
        # ASCII escapes: an echoed lone surrogate could not be encoded otherwise.
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 for a fault of the request; `param` is the field's path."""
    return ApiError(400, message, param, code)


def context_exceeded(num_prompt_tokens: int, limit: int, param: str) -> ApiError:
    """A 400 for a prompt of `num_prompt_tokens` that leaves no room for output within `limit`."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, your prompt has {num_prompt_tokens} tokens, "
        "and at least 1 more has to follow. Shorten it, or send truncate_prompt_tokens.",
        param,
        "context_length_exceeded",
    )


def _context(error: Exception) -> ApiError:
    return bad_request(str(error), "prompt", "context_length_exceeded")


def _queue_full(error: Exception) -> ApiError:
    assert isinstance(error, QueueFull)
    busy = Busy(error.reason, error.queue_depth, error.limit, error.retry_after_s)
    return ApiError(429, str(error), code="queue_full", busy=busy)


def _compiler_busy(error: Exception) -> ApiError:
    assert isinstance(error, CompilerBusy)
    busy = Busy("grammars", error.num_pending, NUM_THREADS, error.retry_after_s)
    return ApiError(429, str(error), code="queue_full", busy=busy)


def _draining(error: Exception) -> ApiError:
    busy = Busy("draining", 0, 0, MIN_RETRY_S)
    return ApiError(503, str(error) or "The server is shutting down.", code="draining", busy=busy)


def _dead(error: Exception) -> ApiError:
    return ApiError(503, str(error) or "The engine is not running.", code="engine_dead")


def _failed(error: Exception) -> ApiError:
    return ApiError(500, "The engine failed while it ran this request.", code="internal_error")


def _param(error: Exception) -> ApiError:
    assert isinstance(error, ParamError)
    return bad_request(str(error), error.param)


def _grammar(error: Exception) -> ApiError:
    assert isinstance(error, GrammarError)
    return bad_request(str(error), error.param)


def _template(error: Exception) -> ApiError:
    return bad_request(f"The chat template refused this conversation: {error}", "messages")


def _own_template(error: Exception) -> ApiError:
    return bad_request(f"The request's own chat template failed: {error}", "chat_template")


TABLE: Mapping[type[Exception], Callable[[Exception], ApiError]] = {
    ContextTooLong: _context,
    NeverFits: _context,
    QueueFull: _queue_full,
    Draining: _draining,
    Unhealthy: _dead,
    EngineFailed: _failed,
    RequestRefused: _dead,
    SchedulerError: _failed,
    ParamError: _param,
    GrammarError: _grammar,
    CompilerBusy: _compiler_busy,
    TemplateError: _template,
    OwnTemplateError: _own_template,
}
"""Exception -> what the client is told. The most derived class counts."""

EXPECTED: tuple[type[Exception], ...] = (ApiError, *TABLE)
"""Everything that `as_api_error` understands."""


def as_api_error(error: Exception) -> ApiError:
    """`error`, one of `EXPECTED`, as the client will see it."""
    if isinstance(error, ApiError):
        return error
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)(error)


def told(error: Exception, request_id: str) -> ApiError:
    """What the client of this request is told about `error`: of a fault of ours, only where our log has more."""
    known = as_api_error(error) if isinstance(error, EXPECTED) else None
    if known is not None and known.status != 500:
        return known
    logger.error("request %s failed: %r", request_id, error, exc_info=error if known is None else None)
    what = known.message if known is not None else "The server had an internal error."
    message = f"{what} The server's log has the details under request id {request_id}."
    return ApiError(500, message, code="internal_error")


def _http_error(error: HTTPException) -> ApiError:
    """What the router itself refuses: an unknown route or a wrong method."""
    if error.status_code == 404:
        return ApiError(404, "There is no such route.", code="not_found")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        allow = f"{allow}, HEAD" if "GET" in allow and "HEAD" not in allow else allow
        message = f"This route does not take this method; it takes {allow}."
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allow})
    return ApiError(error.status_code, str(error.detail), headers=error.headers or {})


def _request_id(request: Request) -> str:
    context = request.scope.get("quire")
    return context.request_id if context else ""


async def on_error(request: Request, error: Exception) -> Response:
    """The answer to any exception, a fault of ours included."""
    return told(error, _request_id(request)).response()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _http_error(error).response()


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return bad_request(f"{name}: {first['msg']}", name).response()


def install_handlers(app: FastAPI) -> None:
    """Make every expected error of `app` take the one shape; for the others see `server.app`."""
    for cls in EXPECTED:
        app.add_exception_handler(cls, on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
