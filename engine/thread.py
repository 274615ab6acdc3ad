"""A thread of its own for work that must be done in order, and answers that come back on the event loop.

What an executor of one thread does, with less on the way: a queue in, and one call into the event loop back. Knows
functions without arguments; nothing of steps.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WorkThread:
    """Does what it is given, one after the other. Starts with the first piece of work, which `prepare` comes before."""

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._do_all, name=name, daemon=True)
        self._prepare = prepare
        self._is_closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises in the thread. Cancelled before its turn, it is not done at all.

        Raises:
            RuntimeError: the thread was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._give(_Job(work, future, loop.call_soon_threadsafe))
        return await future

    def call(self, work: Callable[[], T]) -> T:
        """The same for a caller that may block, in another thread than this one. Raises as `run` does."""
        future: Future[T] = Future()
        self._give(_Job(work, future, _at_once))
        return future.result()

    def close(self) -> None:
        """Have everything done that was given, then end the thread. Harmless when repeated."""
        if not self._is_closed and self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()
        self._is_closed = True

    def _give(self, job: "_Job[Any]") -> None:
        if self._is_closed:
            raise RuntimeError(f"the thread {self._thread.name} is closed")
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def _do_all(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (job := self._jobs.get()) is not None:
            job.do()
            del job  # what it holds is not kept while the thread waits


class _Job(Generic[T]):
    """A piece of work, and who waits for it. Whatever it raises is raised there: this is the `with` block's end."""

    __slots__ = ("_deliver", "_future", "_work")

    def __init__(
        self, work: Callable[[], T], future: "asyncio.Future[T] | Future[T]", deliver: Callable[..., object]
    ) -> None:
        self._work = work
        self._future = future
        self._deliver = deliver

    def do(self) -> None:
        if self._future.cancelled():
            return
        with self:
            self._send(self._future.set_result, self._work())

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is not None:
            self._send(self._future.set_exception, error)
        return True

    def _send(self, settle: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._deliver(_settle, self._future, settle, value)


def _settle(future: "asyncio.Future[T] | Future[T]", settle: Callable[[Any], None], value: object) -> None:
    if not future.cancelled():
        settle(value)


def _at_once(settle: Callable[..., None], *args: Any) -> None:
    settle(*args)
