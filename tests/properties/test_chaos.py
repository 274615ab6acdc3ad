"""Everything at once, for thousands of steps: forks, cancels, preemptions, evictions, pins, tiers that lose and delay
blocks, next turns that go on with the tokens of the last, deadlines, failing steps, tiny pools; one step in flight, and
one ahead of a late engine. Invariants after every step, and every answer is the one of a cold run.

Each run is made from its seed alone and can be played again with `chaos(seed, steps_in_flight)`; a failure names its
seed.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from engine.batch import PENDING, Batch
from engine.errors import StepError
from kvpool.prefix import namespace_root
from kvpool.tier import HostTier
from scheduler.config import SchedulingPolicy
from scheduler.errors import QueueFull
from scheduler.handle import RequestHandle
from scheduler.offload import Backing
from scheduler.request import FinishReason, Request
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, request

NUM_SEEDS, NUM_CALLERS = 6, 150
STEM = [n * 13 % 97 for n in range(60)]
NAMESPACES = [namespace_root("a"), namespace_root("b")]


class UnreliableTier(HostTier):
    """Loses blocks, drops stores, delays reads and cuts them short."""

    is_durable = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng.choice([2_000, 20_000, 1 << 30]))
        self.is_accepting = True
        self.rng = rng

    def store(self, digest: bytes, data: bytes) -> None:
        if self.rng.random() < 0.9:
            super().store(digest, data)

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        done = super().fetch(digests)
        promised: Future[list[bytes]] = Future()
        blocks = done.result()
        if self.rng.random() < 0.2:
            blocks = blocks[: self.rng.randrange(len(blocks) + 1)]
        asyncio.get_running_loop().call_later(self.rng.choice([0.0, 0.0, 0.002]), promised.set_result, blocks)
        return promised


@dataclass
class Caller:
    """Sends one request and does to it what the dice say; may then go on with what was answered."""

    h: House
    rng: random.Random
    request: Request
    longest: int
    outputs: list[list[int]] = field(default_factory=list)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    handles: list[RequestHandle] = field(default_factory=list)

    async def run(self) -> list[RequestHandle]:
        """A conversation of a few turns, each judged; the handles of all of them."""
        await turns(self.rng.randrange(3000))
        while True:
            self.handles.append(handle := await self.take_turn())
            self.judge(handle)
            if self.rng.random() < 0.5 or not self.go_on():
                return self.handles
            await turns(self.rng.randrange(300))

    def go_on(self) -> bool:
        """The next turn: all tokens of this one, an answer's own included, and some more. False when it is too long."""
        own = [self.rng.randrange(97) for _ in range(self.rng.randrange(1, 9))]
        prompt = [*self.request.prompt_ids, *self.rng.choice(self.outputs), *own]
        num_left = self.longest - len(prompt)
        if num_left < 1:
            return False
        fields = {"cache_namespace": self.request.cache_namespace, "pin_key": self.request.pin_key}
        stops = self.request.sampling.stop_token_ids
        max_tokens = min(self.rng.choice([1, 8]), num_left)
        self.request = request(prompt, max_tokens, seed=self.rng.randrange(50), stop_token_ids=stops, **fields)
        return True

    async def take_turn(self) -> RequestHandle:
        self.reasons = {}
        while True:
            try:
                handle = self.h.scheduler.submit(self.request)
                break
            except QueueFull:
                await turns(30)
        self.outputs = [[] for _ in range(self.request.num_choices)]
        whim = self.rng.random()
        if whim < 0.15:
            await turns(self.rng.randrange(80))
            handle.cancel()
        async for events in handle:
            for event in events:
                self.outputs[event.choice] += event.token_ids
                if event.finish_reason is not None:
                    assert event.choice not in self.reasons, "a choice ended twice"
                    self.reasons[event.choice] = event.finish_reason
            if whim > 0.85:
                handle.finish(self.rng.randrange(self.request.num_choices))
        return handle

    def judge(self, handle: RequestHandle) -> None:
        for choice, output in enumerate(self.outputs):
            expected = reference_tokens(self.request, choice)
            assert output == expected[: len(output)], "not the tokens of a cold run"
            if self.reasons[choice] is FinishReason.LENGTH:
                assert len(output) == self.request.max_tokens
        assert sorted(self.reasons) == list(range(self.request.num_choices))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def random_request(rng: random.Random, now_s: float, longest: int) -> Request:
    num_prompt = rng.randrange(1, min(50, longest))
    own = rng.choice([0, 0, rng.randrange(num_prompt + 1)])
    prompt = STEM[: num_prompt - own] + [rng.randrange(97) for _ in range(own)]
    return request(
        prompt,
        min(rng.choice([0, 1, 3, 8, 25]), longest - num_prompt),
        seed=rng.randrange(50),
        num_choices=rng.choice([1, 1, 1, 2, 4]),
        priority=rng.randrange(-1, 2),
        deadline_s=now_s + rng.uniform(0.0, 5.0) if rng.random() < 0.05 else None,
        queue_deadline_s=now_s + rng.uniform(0.0, 5.0) if rng.random() < 0.05 else None,
        cache_namespace=rng.choice(NAMESPACES),
        use_prefix_cache=rng.random() < 0.9,
        pin_key=rng.choice([None, None, "x", "y", "z"]),
        stop_token_ids=frozenset(rng.sample(range(97), 2)),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


async def chaos(seed: int, steps_in_flight: int) -> dict[str, int]:
    """One run; gives what happened in it."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 2, 4]), rng.randrange(16, 40)
    max_preemptions = rng.choice([1, 3])
    settings = {
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([3, 13, 64]),
        "max_num_seqs": rng.choice([3, 8]),
        "max_num_queued_reqs": 40,
        "policy": rng.choice(list(SchedulingPolicy)),
        "prefix_pin_share": rng.choice([0.0, 0.3]),
        "forecast_admission": rng.random() < 0.3,
        "max_preemptions": max_preemptions,
        "max_engine_failures": 1000,
        "max_steps_in_flight": steps_in_flight,
    }

    def fail(batch: Batch) -> None:
        if rng.random() < 0.005:
            raise StepError("the weather")

    engine = {"num_drafts": rng.choice([0, 0, 2]), "fail": fail}
    backing = Backing(UnreliableTier(rng)) if rng.random() < 0.8 else None
    async with house(num_blocks=num_blocks, engine=engine, backing=backing, **settings) as h:
        longest = num_blocks * block_size
        requests = [random_request(rng, h.clock.now(), longest) for _ in range(NUM_CALLERS)]
        callers = [Caller(h, random.Random(rng.random()), r, longest) for r in requests]
        async with asyncio.timeout(120):
            handles = [each for some in await asyncio.gather(*(caller.run() for caller in callers)) for each in some]
        assert all(handle.num_preemptions <= max_preemptions * handle.request.num_choices for handle in handles)
        assert len(h.watcher.ends) == len(handles)
    batches, reasons = h.engine.batches, [reason for end in h.watcher.ends for reason in end.finish_reasons]
    return {
        "steps": len(batches),
        "preemptions": len(h.watcher.preempted),
        "evictions": h.pool.stats().evictions,
        "saves": sum(len(b.saves) for b in batches),
        "loads": sum(len(b.loads) for b in batches),
        "copies": sum(len(b.copies) for b in batches),
        "failures": reasons.count(FinishReason.FAILED),
        "deadlines": reasons.count(FinishReason.DEADLINE),
        "cancelled": reasons.count(FinishReason.CANCELLED),
        "later turns": len(handles) - NUM_CALLERS,
        "pending": sum(row.token_ids[0] == PENDING for b in batches for row in b.rows),
        "hits": sum(end.num_cached_tokens for end in h.watcher.ends),
    }


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_chaos(steps_in_flight: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        try:
            happened.update(await chaos(seed, steps_in_flight))
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
    assert happened["steps"] > 5000
    assert (happened.pop("pending") > 0) == (steps_in_flight > 1)
    assert all(happened.values()), "something never happened"
