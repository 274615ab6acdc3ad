"""The scripted server of the HTTP tests on a real port, for a client that speaks sockets; and a model of two layers."""

import asyncio
import threading

import pytest
import uvicorn

from tests.server.conftest import running


class Live(threading.Thread):
    """An application on a free port, on a thread and an event loop of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.server = None
        self.url = ""

    def run(self):
        asyncio.run(self._serve())

    async def _serve(self):
        async with running() as bench:
            config = uvicorn.Config(bench.client._transport.app, port=0, log_level="error", lifespan="off")
            self.server = uvicorn.Server(config)
            self.server.install_signal_handlers = lambda: None
            serving = asyncio.create_task(self.server.serve())
            while not self.server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.01)
            self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
            self.ready.set()
            await serving


@pytest.fixture(scope="session")
def live_url():
    thread = Live()
    thread.start()
    assert thread.ready.wait(300)  # the native kernels may have to be compiled first
    yield thread.url
    thread.server.should_exit = True
    thread.join(10)
