"""Log lines, as text for people or JSON for machines, written by a thread of their own.

Knows formats and levels. Nothing that runs per token logs; one access line per request goes into a queue and is
written off the event loop. API keys, prompts and answers never reach a line.
"""

import json
import logging
import logging.handlers
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

ACCESS = logging.getLogger("quire.access")
PROBES = frozenset({"/health", "/healthz", "/health/live", "/ready", "/health/ready", "/metrics"})
_CHATTY = ("httpx", "httpcore", "urllib3", "huggingface_hub", "filelock", "asyncio", "sse_starlette", "uvicorn")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _clock(created_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s)) + f".{int(created_s % 1 * 1000):03d}Z"


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value ...`, one line a record plus a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as text; line breaks inside a message are escaped, so that nobody can forge a line."""
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        fields = "".join(f" {name}={_shown(value)}" for name, value in _extra(record).items())
        line = f"{_clock(record.created)} {record.levelname.lower():7} {record.name}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a JSON line."""
        line = {
            "time": _clock(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "=\n\r\t') else text


class _KeepRecord(logging.handlers.QueueHandler):
    """Hands records over whole: the default would format the message twice and drop the traceback."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record itself; it stays in this process."""
        return record


@contextmanager
def logging_to(stream: TextIO, level: str, log_format: str) -> Iterator[None]:
    """Send every logger's records of at least `level` to `stream`, until the block is left (then all is flushed)."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    records: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = logging.handlers.QueueListener(records, handler)
    root, entry = logging.getLogger(), _KeepRecord(records)
    before = (root.level, list(root.handlers))
    root.handlers[:] = [entry]
    root.setLevel(level.upper())
    for chatty in (
        "httpx",
        "httpcore",
        "urllib3",
        "huggingface_hub",
        "filelock",
        "asyncio",
        "sse_starlette",
        "uvicorn",
    ):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.setLevel(before[0])
        root.handlers[:] = before[1]


def log_access(request_id: str, method: str, path: str, status: int, duration_s: float) -> None:
    """One line for one HTTP request, `path` its route; costs its caller a queue entry. Probes show in debug only."""
    level = logging.DEBUG if path in PROBES else logging.INFO
    if ACCESS.isEnabledFor(level):
        fields = {"request_id": request_id, "status": status, "seconds": round(duration_s, 4)}
        ACCESS.log(level, "%s %s", method, path, extra=fields)
