"""`quire serve`: one process from the first bind to the last answer.

Order of life: bind (so that /health answers at once) -> load in a thread (/ready says what is going on) -> serve -> on
SIGTERM or SIGINT drain -> stop. A second signal stops at once. Knows this order and the signals; knows neither HTTP
routes (`server.app`) nor how a model is put together (`server.build`).
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from engine.errors import LoadError
from server.config import ServerConfig, read_config
from server.flags import ConfigError
from server.logs import logging_to
from server.openmp import tame_thread_barriers
from server.progress import LoadProgress

if TYPE_CHECKING:
    from scheduler.loop import Scheduler
    from server.build import Loaded
    from server.state import ServerState

LOG = logging.getLogger("quire.serve")
KEEP_ALIVE_S = 90  # clients pool idle connections for up to 75 s; closing first would lose their next request
LAST_ANSWERS_S = 5  # for answers that are complete but not yet sent when the scheduler has stopped
_LOADER = "quire-load"
Result = TypeVar("Result")


def main(argv: Sequence[str]) -> int:
    """Run `quire serve ARGV`; returns the exit status: 0 stopped on request, 1 could not serve, 2 wrong settings."""
    try:
        config = read_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"quire serve: {error}\n")
        return 2
    tame_thread_barriers(os.environ)
    gc.disable()  # what imports and loading make stays: looking through it again and again took a tenth of the start
    with logging_to(sys.stderr, config.log_level, config.log_format):
        try:
            status = _run(config)
        except ConfigError as error:
            LOG.error("%s", error)
            status = 2
    if any(thread.name.startswith(_LOADER) for thread in threading.enumerate()):
        os._exit(status)  # asked to stop while loading: native code in the loading thread cannot be interrupted
    return status


def _run(config: ServerConfig) -> int:
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        LOG.error("cannot listen on %s:%d: %s", config.host, config.port, error.strerror or error)
        return 1
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Service(config, listener).run())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything slow happens.

    Raises:
        OSError: the address is taken or not ours.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: `Service` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _StopSignals:
    """SIGTERM and SIGINT as two events: the first asks for a graceful end, the second for an immediate one."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.first.is_set():
            LOG.warning("%s again: stopping at once", number.name)
            self.second.set()
        else:
            LOG.info("%s: finishing what runs, then stopping", number.name)
            self.first.set()


class Service:
    """One server process, from bound socket to exit status."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        # Imported here, so that a wrong flag or a taken port is reported without waiting for the HTTP stack.
        from server.app import create_app
        from server.limits import KeyFileError, KeyRing
        from server.metrics import Metrics
        from server.state import ServerState

        self._config = config
        self._listener = listener
        self._metrics = Metrics(version=version("quire"), vllm_names=not config.disable_vllm_metrics)
        try:
            self.state = ServerState(config, self._metrics, KeyRing.load(config.api_key, config.api_key_file))
        except KeyFileError as error:
            raise ConfigError(str(error)) from error
        self._http = _HttpServer(
            uvicorn.Config(
                create_app(self.state),
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_ANSWERS_S,
            )
        )

    async def run(self) -> int:
        """Serve until asked to stop; returns the exit status."""
        signals = _StopSignals()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        LOG.info("listening on %s", url_of(self._listener), extra=self._config.visible())
        try:
            return await self._serve(signals)
        finally:
            self._http.should_exit = True
            self._http.force_exit = signals.second.is_set()
            await asyncio.wait([http], timeout=LAST_ANSWERS_S + 1)
            LOG.info("stopped")

    async def _serve(self, signals: _StopSignals) -> int:
        progress = LoadProgress(self.state.set_loading, sys.stderr)
        loader = ThreadPoolExecutor(1, thread_name_prefix=_LOADER)
        loading = asyncio.get_running_loop().run_in_executor(loader, _load, self._config, progress)
        loader.shutdown(wait=False)
        try:
            try:
                loaded = await _first(loading, signals.first.wait())
            finally:
                progress.close()
            if loaded is None:
                return 0
            from server.build import assemble

            served = assemble(loaded, self._config, self._metrics)
        except (LoadError, ConfigError) as error:
            LOG.error("cannot serve: %s", error)
            self.state.set_failed(str(error))
            return 1
        loop = asyncio.create_task(served.scheduler.run())
        gc.freeze()  # what is there now lives as long as the process: never look at it again
        gc.enable()
        self.state.set_ready(served)
        self._announce(loaded)
        try:
            await _first(_watch(loop, served.scheduler, self.state), signals.first.wait())
            await self._drain(served.scheduler, loop, signals)
        finally:
            await served.own_templates.close()
            served.structured.close()
            loaded.engine.close()
        return 0

    def _announce(self, loaded: "Loaded") -> None:
        info = loaded.engine.info
        LOG.info(
            "ready after %.1f s: POST %s/v1/chat/completions",
            self.state.uptime_s,
            url_of(self._listener),
            extra={
                "model": self.state.served.model_name if self.state.served else "",
                "dtype": info.dtype,
                "kv_dtype": info.kv_dtype,
                "device": info.device,
                "attention": info.attention_backend,
                "max_model_len": info.max_model_len,
                "kv_blocks": info.num_blocks,
                "weight_mb": round(info.weight_bytes / 1e6),
                "kv_mb": round(info.kv_bytes / 1e6),
            },
        )

    async def _drain(self, scheduler: "Scheduler", loop: asyncio.Task[None], signals: _StopSignals) -> None:
        """Stop admitting, let running requests finish for `--shutdown-timeout`, then cancel what is left."""
        self.state.set_draining()
        scheduler.drain()
        second = asyncio.ensure_future(signals.second.wait())
        await asyncio.wait([loop, second], timeout=self._config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if not loop.done():
            LOG.warning("stopping %d running and %d waiting sequences", *_load_of(scheduler))
            scheduler.stop()
            await asyncio.wait([loop], timeout=LAST_ANSWERS_S)


def _load(config: ServerConfig, progress: LoadProgress) -> "Loaded":
    """In the loading thread: importing torch alone takes seconds in which /health already answers."""
    progress("importing torch", 0.0)
    from server.build import load

    return load(config, progress)


def _load_of(scheduler: "Scheduler") -> tuple[int, int]:
    stats = scheduler.stats()
    return stats.num_running, stats.num_waiting


async def _watch(loop: asyncio.Task[None], scheduler: "Scheduler", state: "ServerState") -> None:
    """Turn health red when the scheduler's loop ends although nobody asked; then stay, so that clients hear why."""
    await asyncio.wait([loop])
    error = None if loop.cancelled() else loop.exception()
    reason = scheduler.stats().unhealthy or f"the scheduler's loop ended: {error or 'nobody asked for it'}"
    LOG.critical("the engine is dead: %s", reason, exc_info=error)
    state.set_failed(reason)
    await asyncio.Event().wait()


async def _first(work: Awaitable[Result], interrupt: Awaitable[object]) -> Result | None:
    """The result of `work`; None when `interrupt` came first."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(interrupt)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finished = tasks[0].done()
    for task in tasks:
        task.cancel()
    return tasks[0].result() if finished else None  # type: ignore[return-value]  # tasks[0] is `work`
