"""A stateful machine against the scheduler: requests, whims and turns of the event loop, in any order."""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch import Batch
from engine.errors import StepError
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.errors import NeverFits, QueueFull
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from tests.fakes.clock import VirtualClock
from tests.fakes.engine import FakeEngine, reference_tokens
from tests.scheduler.harness import Watcher, read, request

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class SchedulerMachine(RuleBasedStateMachine):
    """Small alphabets and tiny pools, so that prefixes collide and blocks run out."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.handles: list[RequestHandle] = []
        self.clock = VirtualClock()
        self.fail_next = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        policy=st.sampled_from(SchedulingPolicy),
        enable_prefix_caching=st.booleans(),
        num_drafts=st.integers(0, 2),
        steps_in_flight=st.integers(1, 2),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool,
        num_drafts: int,
        steps_in_flight: int,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.engine = FakeEngine(
            num_blocks,
            block_size,
            clock=self.clock,
            latency_s=0.1,
            num_drafts=num_drafts,
            fail=self.fail,
            max_in_flight=steps_in_flight,
            whims=random.Random(budget) if steps_in_flight > 1 else None,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1000,
            block_size=block_size,
            max_num_queued_reqs=6,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            max_engine_failures=1000,
            max_steps_in_flight=steps_in_flight,
            check_invariants=True,
        )
        self.watcher = Watcher()

        async def start() -> None:
            self.scheduler = Scheduler(self.engine, self.pool, config, observer=self.watcher, clock=self.clock)
            self.watcher.scheduler = self.scheduler
            self.task = asyncio.create_task(self.scheduler.run())

        self.run(start())

    def fail(self, batch: Batch) -> None:
        if self.fail_next:
            self.fail_next = False
            raise StepError("asked to")

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 9),
        num_choices=st.integers(1, 3),
        priority=st.integers(-1, 1),
        patience=st.none() | st.floats(0.0, 1.0),
        wants_prompt_logprobs=st.booleans(),
        seed=st.integers(0, 1),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        num_choices: int,
        priority: int,
        patience: float | None,
        wants_prompt_logprobs: bool,
        seed: int,
    ) -> None:
        r = request(
            prompt,
            max_tokens,
            seed=seed,
            num_choices=num_choices,
            priority=priority,
            deadline_s=None if patience is None else self.clock.now() + patience,
            prompt_logprobs=0 if wants_prompt_logprobs else None,
            stop_token_ids=frozenset({7, 8, 9}),
        )

        async def send() -> None:
            with suppress(QueueFull, NeverFits):
                self.handles.append(self.scheduler.submit(r))

        self.run(send())

    @precondition(lambda self: self.handles)
    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        self.handles[number % len(self.handles)].cancel()

    @precondition(lambda self: self.handles)
    @rule(number=st.integers(0, 9), choice=st.integers(0, 2))
    def finish(self, number: int, choice: int) -> None:
        handle = self.handles[number % len(self.handles)]
        handle.finish(choice % handle.request.num_choices)

    @rule()
    def break_next_step(self) -> None:
        self.fail_next = True

    @rule(turns=st.integers(1, 40))
    def turn(self, turns: int) -> None:
        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(wait())

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "scheduler"):
            assert not self.engine.problems
            assert not self.watcher.problems
            if not self.engine.in_flight and not self.task.done():
                self.pool.check()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.fail_next = False
            self.run(self.end())
        self.loop.close()

    async def end(self) -> None:
        self.scheduler.drain()
        for handle in self.handles:
            for choice, answer in enumerate(await read(handle)):
                expected = reference_tokens(handle.request, choice)
                assert answer.token_ids == expected[: len(answer.token_ids)]
        await asyncio.wait_for(self.task, 5)
        assert len(self.watcher.ends) == len(self.handles)
        self.scheduler.check()
        self.nothing_is_wrong()
        assert self.pool.stats().num_referenced == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
