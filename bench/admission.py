"""What admission by forecast changes: the same loads with it and without, in virtual time. `python -m bench.admission`.

Requests wait from the start behind a pool that is far too small for all slots, and are served by the real scheduler
over an engine that only counts. The engine's time follows from steps and tokens: a step costs as much as `STEP_TOKENS`
of its tokens do, much on a GPU and little on a CPU. Below 1 the forecast wins. No model is needed, and the machine does
not matter.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.kv_waste import TimeKeeper, clipped
from bench.report import table
from engine.batch import Batch, StepOutput
from engine.sampling.params import SamplingParams
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.loop import Scheduler
from scheduler.observer import NullObserver
from scheduler.request import PreemptionReason, Request

STEP_TOKENS = {"GPU": 200, "CPU": 10}
HEAD = ("answers", "preemptions without", "with", "steps", "tokens", *(f"time, {name}" for name in STEP_TOKENS))
Draw = Callable[[random.Random, int], int]


def log_normal(median: float, sigma: float, longest: int) -> Draw:
    """Lengths whose logarithm deviates by `sigma`."""
    return lambda rng, number: clipped(rng.lognormvariate(math.log(median), sigma), longest)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and the house they come to; lengths in tokens, of the `number`-th request."""

    name: str
    num_requests: int
    prompt: Draw
    answer: Draw
    max_tokens: int = 1024
    pool_tokens: int = 8192
    num_slots: int = 64
    num_step_tokens: int = 512


LOADS = (
    Load("all of 256", 400, lambda rng, n: 100, lambda rng, n: 256, max_tokens=256),
    Load("uniform, 1 to 511", 400, lambda rng, n: 100, lambda rng, n: rng.randrange(1, 512), max_tokens=512),
    Load(
        "exponential, 190",
        400,
        lambda rng, n: rng.randrange(16, 96),
        lambda rng, n: clipped(rng.expovariate(1 / 190), 800),
        max_tokens=800,
        pool_tokens=2560,
        num_slots=32,
        num_step_tokens=256,
    ),
    Load("log-normal, deviation 0.9", 500, log_normal(120, 1.0, 1500), log_normal(180, 0.9, 1024)),
    Load("log-normal, deviation 1.5", 500, log_normal(120, 1.0, 1500), log_normal(100, 1.5, 2000), max_tokens=2000),
    Load(
        "short or long",
        600,
        lambda rng, n: 64,
        lambda rng, n: rng.randrange(2, 10) if rng.random() < 0.7 else rng.randrange(400, 800),
    ),
    Load(
        "changing, 40 and 400",
        800,
        lambda rng, n: 100,
        lambda rng, n: log_normal(400 if n // 200 % 2 else 40, 0.6, 1024)(rng, n),
    ),
    Load("behind long prompts", 300, log_normal(1500, 0.6, 6000), log_normal(150, 0.8, 1024), 1024, 16_384, 32, 1024),
)


@dataclass
class Counts(NullObserver):
    """What a run took."""

    num_steps: int = 0
    num_tokens: int = 0
    num_preempted: int = 0

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        """Count."""
        self.num_preempted += 1

    def time(self, step_tokens: int) -> int:
        """In what a token costs."""
        return self.num_steps * step_tokens + self.num_tokens


class CountingEngine(TimeKeeper):
    """Counts steps and tokens."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    async def step(self, batch: Batch) -> StepOutput:
        """See `engine.batch.StepEngine`."""
        self._counts.num_steps += 1
        self._counts.num_tokens += batch.num_tokens
        return await super().step(batch)


async def serve(load: Load, seed: int, counts: Counts, *, forecast_admission: bool) -> None:
    """Serve all requests, and add up in `counts`."""
    rng = random.Random(f"{load.name}/{seed}")
    config = SchedulerConfig(
        max_num_seqs=load.num_slots,
        max_num_batched_tokens=load.num_step_tokens,
        max_num_queued_reqs=None,
        forecast_admission=forecast_admission,
    )
    pool = BlockPool(load.pool_tokens // config.block_size)
    scheduler = Scheduler(CountingEngine(counts), pool, config, observer=counts)
    serving = asyncio.create_task(scheduler.run())
    lengths = [(load.prompt(rng, n), load.answer(rng, n)) for n in range(load.num_requests)]
    await asyncio.gather(
        *(
            answer(
                scheduler, Request(f"r{n}", (10 + n, *[2] * (num_in - 1)), SamplingParams(), load.max_tokens), num_out
            )
            for n, (num_in, num_out) in enumerate(lengths)
        )
    )
    scheduler.drain()
    await serving


async def answer(scheduler: Scheduler, request: Request, num_out: int) -> None:
    """Read one answer and end it where its model would have."""
    handle, num_tokens = scheduler.submit(request), 0
    async for events in handle:
        num_tokens += sum(len(event.token_ids) for event in events)
        if num_tokens >= num_out and not handle.is_done:
            handle.finish(0)


def compare(load: Load, num_seeds: int) -> list[str]:
    """The table's row."""
    sides = {False: Counts(), True: Counts()}
    for forecast_admission, counts in sides.items():
        for seed in range(num_seeds):
            asyncio.run(serve(load, seed, counts, forecast_admission=forecast_admission))
    without, with_it = sides[False], sides[True]
    ratios = [with_it.num_steps / without.num_steps, with_it.num_tokens / without.num_tokens]
    ratios += [with_it.time(step_tokens) / without.time(step_tokens) for step_tokens in STEP_TOKENS.values()]
    return [load.name, str(without.num_preempted), str(with_it.num_preempted), *(f"{ratio:.2f} x" for ratio in ratios)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(table(HEAD, [compare(load, args.seeds) for load in LOADS]))


if __name__ == "__main__":
    main()
