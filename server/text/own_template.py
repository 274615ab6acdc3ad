"""Chat templates that requests bring: rendered in a process of their own, which may be killed.

The sandbox keeps a template from the server's data, but not from its time and memory: one multiplication can take as
much as it likes of both, and Python can't be interrupted in it. So nothing of a foreign template, not even its syntax,
is looked at in the serving process. Knows that process, its bounds and the line of JSON each way; what a template is,
is `template`'s to know.

    server ---- {"source", "arguments", ...} ----> python -m server.text.own_template
           <--- {"text"} or {"error"} -----------     one at a time; bounded in memory, and by an alarm that ends it
"""

import asyncio
import json
import math
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from server.text.template import ChatTemplate, TemplateError

try:
    import resource
except ImportError:  # not a POSIX system: only the time is bounded there
    resource = None  # type: ignore[assignment]

MAX_CHARS = 1 << 20
"""Of a rendered prompt: more than any context holds."""

MAX_MEMORY_BYTES = 1 << 30
"""Address space of the process."""

GRACE_S = 1.0
"""After the time limit, before the process is ended: loops notice the limit themselves, and say so."""

START_S = 30.0
"""In which a new process must be there."""

_LINE_BYTES = 12 * MAX_CHARS + 1024
"""A reply at its longest: a character beyond the basic plane is written as two escapes."""

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG")


class OwnTemplateError(TemplateError):
    """A template that came with a request is at fault, or refused the messages; the message is what it said."""


class OwnTemplates:
    """Renders foreign templates, one at a time. The process starts with the first and ends with the server."""

    def __init__(self, special_tokens: Mapping[str, str], *, time_limit_s: float = 2.0) -> None:
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, source: str, arguments: Mapping[str, Any]) -> str:
        """The prompt that the template makes of `ChatTemplate.render`'s arguments.

        Raises:
            OwnTemplateError: it is no template, refused the messages, or took too much time or memory.
        """
        job = {
            "source": source,
            "arguments": arguments,
            "special_tokens": self._special_tokens,
            "time_limit_s": self._time_limit_s,
        }
        async with self._turn:
            reply = await self._ask(json.dumps(job).encode())
        if "text" not in reply:
            raise OwnTemplateError(reply["error"])
        return str(reply["text"])

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _ask(self, line: bytes) -> dict[str, Any]:
        """The reply to one job. Whatever else happens, a caller that leaves included, is the end of the process."""
        process, self._process = await self._running(), None
        async with AsyncExitStack() as undo:
            undo.push_async_callback(_end, process)
            try:
                async with asyncio.timeout(self._time_limit_s + 2 * GRACE_S):
                    reply = await _exchange(process, line)
            except (TimeoutError, ConnectionError, ValueError):  # ValueError: of a line without end
                reply = b""
            if not reply.endswith(b"\n"):
                return {"error": f"the chat template took more than {self._time_limit_s:g} s, or too much memory"}
            undo.pop_all()
        self._process = process
        answer: dict[str, Any] = json.loads(reply)
        return answer

    async def _running(self) -> Process:
        """The process, started anew when there is none that can still answer."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=_LINE_BYTES,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **kept},  # no key, no setting of the server's
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(_end, process)
            async with asyncio.timeout(START_S):
                await _exchange(process, b"")
            undo.pop_all()
        return process


async def _exchange(process: Process, line: bytes) -> bytes:
    """Send one line, and read one; no whole one when the process has ended."""
    assert process.stdin is not None, "it was started with pipes"
    assert process.stdout is not None, "it was started with pipes"
    process.stdin.write(line + b"\n")
    await process.stdin.drain()
    return await process.stdout.readline()


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()  # to the end of its output, so that nothing of it is left to the event loop


@dataclass
class _Tokens:
    special_tokens: dict[str, str]


def main() -> None:
    """The process: answers each line of its input with one; an empty one says that it is there."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        reply = _reply(json.loads(line)) if line.strip() else {}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(job: Mapping[str, Any]) -> dict[str, str]:
    limit_s = job["time_limit_s"]
    _set_alarm(math.ceil(limit_s + GRACE_S))
    try:
        template = ChatTemplate(
            job["source"], _Tokens(job["special_tokens"]), time_limit_s=limit_s, max_chars=MAX_CHARS
        )
        return {"text": template.render(**job["arguments"])}
    except TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the chat template needs too much memory"}
    finally:
        _set_alarm(0)


def _set_alarm(seconds: int) -> None:
    """Have the system end this process, in the middle of whatever it does; 0 takes that back."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    main()
