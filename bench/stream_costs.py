"""What a streamed token costs the server: the whole server over a model that computes nothing, through real sockets.

The server has one core to itself, the load generator the others. Its processor time per token says how many tokens a
core could stream, also on a busy machine; the wall clock says it only on a quiet one.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.arrivals import Closed
from bench.processes import cpu_seconds, free_port, running, wait_until_ready
from bench.report import table
from bench.targets import HttpTarget, Route
from bench.workloads import Question

BAR_PER_S, MANY = 5000, 32
NUM_IN, NUM_OUT = 32, 256
ROUTES: tuple[Route, ...] = ("completions", "chat")
HEAD = ("route", "streams", "tokens", "tokens/s", "server us/token", "tokens/s of a core", "generator us/token", "bar")


@dataclass(frozen=True, slots=True)
class StreamCost:
    """One load: what was streamed, how long it took, and what both sides computed meanwhile."""

    num_tokens: int
    wall_s: float
    server_cpu_s: float
    generator_cpu_s: float

    def cells(self, num_streams: int) -> list[str]:
        """As the table shows them. The bar is for a server with enough to do, not for one stream's round trips."""
        server_us = 1e6 * self.server_cpu_s / self.num_tokens
        rate = self.num_tokens / self.wall_s
        return [
            str(self.num_tokens),
            f"{rate:.0f}",
            f"{server_us:.0f}",
            f"{1e6 / server_us:.0f}",
            f"{1e6 * self.generator_cpu_s / self.num_tokens:.0f}",
            f"{BAR_PER_S}/s {'met' if rate >= BAR_PER_S else 'missed'}" if num_streams >= MANY else "",
        ]


def stream_table(streams: Sequence[int], num_rounds: int) -> str:
    """Both routes at every number of streams. This process keeps off the server's core meanwhile."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    rows = []
    with apart() as core, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "bench.noop_server", "--port", str(port)]
        with running([*command, *([] if core is None else ["--core", str(core)])], log) as process:
            wait_until_ready(process, f"{url}/ready", log, 300.0)
            for route in ROUTES:
                for num_streams in streams:
                    cost = stream_cost(url, route, num_streams, num_rounds, process.pid)
                    rows.append([route, str(num_streams), *cost.cells(num_streams)])
    return table(HEAD, rows)


@contextlib.contextmanager
def apart() -> Iterator[int | None]:
    """A core for the server, the others for this process; None where there is one core, or no way to choose."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) < 2:
        yield None
        return
    core = min(cores)
    os.sched_setaffinity(0, cores - {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, cores)


def stream_cost(url: str, route: Route, num_streams: int, num_rounds: int, pid: int) -> StreamCost:
    """Run one load, after a short one that is not counted."""
    target = HttpTarget("no-op", url, lambda ids: " ".join(map(str, ids)), route)
    questions = [Question((1, 2, number, *range(NUM_IN - 3)), NUM_OUT) for number in range(num_streams * num_rounds)]
    target.learn_dialect(questions[0])
    target.run(Closed(num_streams), questions[:num_streams], "warm-up")
    began_cpu_s = cpu_seconds(pid)
    run = target.run(Closed(num_streams), questions, "load")
    server_cpu_s = cpu_seconds(pid) - began_cpu_s
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} streams failed, the first with: {failed[0]}")
    num_tokens = sum(record.num_output_tokens for record in run.records)
    return StreamCost(num_tokens, run.wall_s, server_cpu_s, run.generator_cpu_s)
