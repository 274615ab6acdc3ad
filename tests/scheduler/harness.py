"""A scheduler with a fake engine and a virtual clock, watched: invariants are checked after every step."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engine.batch import TokenLogprob
from engine.sampling.params import SamplingParams
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from scheduler.observer import NullObserver, RequestReport, StepReport
from scheduler.offload import Backing
from scheduler.request import FinishReason, PreemptionReason, Request
from tests.fakes.clock import VirtualClock
from tests.fakes.engine import FakeEngine

PATIENCE_S = 20.0
_request_numbers = count()

STEPS_IN_FLIGHT: ContextVar[int] = ContextVar("steps in flight", default=1)
"""What houses are built with by default. `conftest.py` runs every test of this folder with one step in flight, where
the engine answers in step, and with two, where it answers late and out of step."""


@dataclass
class Answer:
    """One choice, as its consumer saw it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


class Watcher(NullObserver):
    """Keeps what it is told, and checks the scheduler after each step."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.steps: list[StepReport] = []
        self.ends: list[RequestReport] = []
        self.preempted: list[str] = []
        self.preemption_reasons: list[PreemptionReason] = []
        self.lookups: list[tuple[int, int]] = []
        self.ttfts: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.problems: list[str] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)
        assert self.scheduler is not None
        try:
            self.scheduler.check()
        except AssertionError as problem:
            self.problems.append(str(problem))
            raise

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        self.ttfts.append(ttft_s)

    def on_token_gap(self, gap_s: float, num_tokens: int) -> None:
        self.gaps.append((gap_s, num_tokens))

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        self.lookups.append((num_queried_tokens, num_hit_tokens))

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        self.preempted.append(request.request_id)
        self.preemption_reasons.append(reason)

    def on_request_end(self, report: RequestReport) -> None:
        self.ends.append(report)


@dataclass
class House:
    """Everything a test may want to touch."""

    scheduler: Scheduler
    engine: FakeEngine
    pool: BlockPool
    clock: VirtualClock
    watcher: Watcher
    task: "asyncio.Task[None]"

    async def answer(self, request: Request) -> list[Answer]:
        """Submit and read to the end."""
        return await read(self.scheduler.submit(request))

    async def answers(self, requests: Sequence[Request]) -> list[list[Answer]]:
        """Submit all at once, in order, and read all to the end."""
        handles = [self.scheduler.submit(request) for request in requests]
        return list(await asyncio.gather(*(read(handle) for handle in handles)))

    async def steps(self, num_steps: int) -> None:
        """Wait until the engine has begun that many steps in all."""
        async with asyncio.timeout(PATIENCE_S):
            while self.engine.num_steps < num_steps:  # noqa: ASYNC110  gives the loop under test its turns
                await asyncio.sleep(0)

    async def turns(self, count: int = 400) -> None:
        """Give the loop under test that many turns: enough, by default, for whatever can happen by itself."""
        for _ in range(count):
            await asyncio.sleep(0)

    def assert_clean(self) -> None:
        """Nothing lives, nothing leaked, nothing was found wrong on the way."""
        assert not self.engine.problems
        assert not self.watcher.problems
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.pool.num_referenced == 0


async def read(handle: RequestHandle) -> list[Answer]:
    """Read a handle to its end: one answer per choice, checking that each ends exactly once, with its last event."""
    answers = [Answer() for _ in range(handle.request.num_choices)]
    async with asyncio.timeout(PATIENCE_S):
        async for events in handle:
            assert events
            for event in events:
                answer = answers[event.choice]
                assert answer.reason is None, "an event after the end"
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs
                answer.reason, answer.stop_token_id, answer.error = (
                    event.finish_reason,
                    event.stop_token_id,
                    event.error,
                )
    assert all(answer.reason is not None for answer in answers), "a choice without an end"
    return answers


@asynccontextmanager
async def house(
    *,
    num_blocks: int = 64,
    engine: dict[str, Any] | None = None,
    clean: bool = True,
    backing: Backing | None = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """A running scheduler; drained and checked for leaks on the way out (unless not `clean`)."""
    ahead = STEPS_IN_FLIGHT.get()
    defaults = {"block_size": 4, "check_invariants": True, "max_model_len": 4096, "max_steps_in_flight": ahead}
    config = SchedulerConfig(**defaults | settings)
    clock, watcher, pool = VirtualClock(), Watcher(), BlockPool(num_blocks)
    manners = {"latency_s": 0.01, "max_in_flight": config.max_steps_in_flight}
    manners["whims"] = random.Random(num_blocks) if config.max_steps_in_flight > 1 else None
    fake = FakeEngine(num_blocks, config.block_size, clock=clock, **manners | (engine or {}))
    scheduler = Scheduler(fake, pool, config, observer=watcher, clock=clock, backing=backing)
    watcher.scheduler = scheduler
    task = asyncio.create_task(scheduler.run())
    try:
        yield House(scheduler, fake, pool, clock, watcher, task)
        scheduler.drain()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(task, return_exceptions=True)
    finally:
        task.cancel()
    if clean:
        House(scheduler, fake, pool, clock, watcher, task).assert_clean()


def request(prompt: int | Sequence[int] = 8, max_tokens: int = 8, *, seed: int = 0, **fields: Any) -> Request:
    """A request over `prompt` tokens (a length, or the ids); sampling fields and request fields by name."""
    prompt_ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    sampling_names = SamplingParams.__dataclass_fields__.keys()
    sampling = SamplingParams(seed=seed, **{name: value for name, value in fields.items() if name in sampling_names})
    others = {name: value for name, value in fields.items() if name not in sampling_names}
    return Request(f"r{next(_request_numbers)}", prompt_ids, sampling, max_tokens, **others)
