"""Host time per scheduler step with a model that computes nothing, measured from one commit to the next.

At three depths: the scheduler alone, with the visit to the engine's thread, and with the engine's own host work
(inputs, attention's planning, sampling). All rows decode; what they say is dropped after each step, so that it does not
pile up as it never does in a server, and nobody is woken for it: this is no streaming cost.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import uvloop

from bench.figures import percentile
from bench.noop import VOCAB_SIZE, NoOpEngine, engine_around
from bench.report import table
from engine.batch import StepEngine
from engine.sampling.params import SamplingParams
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from scheduler.observer import NullObserver, StepReport
from scheduler.request import Request

BARS_MS = {1: 0.3, 256: 1.5}
DEPTHS = ("scheduler", "and the engine's thread", "and the engine's host work")
NUM_IN = 16
BLOCK_SIZE = 16
HEAD = ("host work per step", "rows", "plan ms", "commit ms", "engine ms", "step ms", "p95", "CPU ms", "bar")


@dataclass(frozen=True, slots=True)
class Moment:
    """A step's commit: wall clock and processor time of the whole process, in seconds."""

    wall_s: float
    cpu_s: float
    report: StepReport


class Watch(NullObserver):
    """Keeps the steps in which all rows decode."""

    def __init__(self, num_rows: int, num_steps: int) -> None:
        self.moments: list[Moment] = []
        self.enough = asyncio.Event()
        self.handles: list[RequestHandle] = []
        self._num_rows = num_rows
        self._num_steps = num_steps

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""
        if report.num_decode_tokens == self._num_rows and report.num_prefill_tokens == 0:
            self.moments.append(Moment(time.perf_counter(), time.process_time(), report))
        if len(self.moments) == self._num_steps:
            self.enough.set()
        for handle in self.handles:
            handle.take()


async def watch_steps(depth: str, num_rows: int, num_steps: int) -> list[Moment]:
    """Run `num_rows` sequences through `num_steps` decode steps."""
    num_out = num_steps + 64
    num_blocks = num_rows * (2 + (NUM_IN + num_out) // BLOCK_SIZE) + 64
    engine, close = engine_of(depth, num_rows, num_blocks)
    watch = Watch(num_rows, num_steps)
    settings = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=budget(num_rows), max_model_len=2048)
    scheduler = Scheduler(engine, BlockPool(num_blocks), settings, observer=watch)
    loop = asyncio.create_task(scheduler.run())
    gc.collect()
    gc.freeze()  # as the server does
    try:
        watch.handles = [scheduler.submit(question(number, num_out)) for number in range(num_rows)]
        await watch.enough.wait()
    finally:
        scheduler.stop()
        await loop
        close()
        gc.unfreeze()
    return watch.moments[:num_steps]


def budget(num_rows: int) -> int:
    """Tokens of a step: every row's token, and room for prompts."""
    return max(512, 2 * num_rows)


def question(number: int, num_out: int) -> Request:
    """A greedy request with a prompt of its own."""
    prompt_ids = (3 + number // 500, 3 + number % 500, *range(10, 8 + NUM_IN))
    return Request(f"noop-{number}", prompt_ids, SamplingParams(temperature=0.0), num_out)


def engine_of(depth: str, num_rows: int, num_blocks: int) -> tuple[StepEngine, Callable[[], None]]:
    """An engine of one of `DEPTHS`, and what ends it."""
    if depth == DEPTHS[2]:
        engine = engine_around(num_rows, budget(num_rows), num_blocks)
        return engine, engine.close
    noop = NoOpEngine(range(3, 103), num_blocks, VOCAB_SIZE, hops=depth == DEPTHS[1])
    return noop, noop.close


def row(depth: str, num_rows: int, moments: Sequence[Moment]) -> list[str]:
    """One line of the table: medians over the steps, and mean processor time, in milliseconds."""
    gaps = [1000 * (after.wall_s - before.wall_s) for before, after in pairwise(moments)]
    cpu_ms = 1000 * (moments[-1].cpu_s - moments[0].cpu_s) / len(gaps)
    reports = [moment.report for moment in moments]
    parts = [1000 * statistics.median(getattr(one, part) for one in reports) for part in ("plan_s", "commit_s")]
    engine_ms = 1000 * statistics.median(one.engine_s for one in reports)
    step_ms = statistics.median(gaps)
    figures = [*parts, engine_ms, step_ms, percentile(gaps, 0.95), cpu_ms]
    return [depth, str(num_rows), *(f"{figure:.3f}" for figure in figures), verdict(depth, num_rows, step_ms)]


def verdict(depth: str, num_rows: int, step_ms: float) -> str:
    """The bar is for everything that the host does."""
    bar_ms = BARS_MS.get(num_rows)
    if bar_ms is None or depth != DEPTHS[-1]:
        return ""
    return f"{bar_ms} ms {'met' if step_ms <= bar_ms else 'missed'}"


def step_table(batch_sizes: Sequence[int], num_steps: int) -> str:
    """Every depth at every batch size, on the kind of event loop that the server uses."""
    rows = []
    for depth in DEPTHS:
        for num_rows in batch_sizes:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rows.append(row(depth, num_rows, runner.run(watch_steps(depth, num_rows, num_steps))))
    return table(HEAD, rows)
