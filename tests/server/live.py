"""An application over real sockets, on a thread and an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.server.conftest import Bench, running

START_S = 20.0


class Live(threading.Thread):
    """`running(**settings)` on a free port. `bench` belongs to this thread's loop; look, but don't await."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.server: uvicorn.Server | None = None
        self.bench: Bench | None = None
        self.url = ""
        self._settings = settings

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        async with running(**self._settings) as bench:
            config = uvicorn.Config(bench.client._transport.app, port=0, log_level="error", lifespan="off")
            self.bench = bench
            self.server = uvicorn.Server(config)
            self.server.install_signal_handlers = lambda: None
            serving = asyncio.create_task(self.server.serve())
            while not self.server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.01)
            self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
            self.ready.set()
            await serving


@contextmanager
def live_server(**settings: Any) -> Iterator[Live]:
    """A running `Live`."""
    thread = Live(**settings)
    thread.start()
    assert thread.ready.wait(START_S)
    yield thread
    thread.server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
