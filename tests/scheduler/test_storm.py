"""Hundreds of requests of every kind against a pool of a few blocks: each is answered once, each block comes back."""

import asyncio
import random
from typing import Any

import pytest

from engine.batch import Batch, Row
from engine.errors import StepError
from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.errors import QueueFull
from scheduler.handle import RequestHandle
from scheduler.request import FinishReason, Request
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, request

NUM_BLOCKS, BLOCK_SIZE = 12, 4
STEM = list(range(20, 60))


def random_request(rng: random.Random, now_s: float) -> Request:
    num_prompt, max_tokens = rng.randrange(1, 30), rng.choice([0, 1, 2, 5, 11, 18])
    own = rng.randrange(num_prompt + 1)
    return request(
        STEM[: num_prompt - own] + [rng.randrange(97) for _ in range(own)],
        max_tokens,
        seed=rng.randrange(1000),
        num_choices=rng.choice([1, 1, 1, 2, 5]),
        priority=rng.randrange(-2, 3),
        deadline_s=now_s + rng.uniform(0.0, 3.0) if rng.random() < 0.15 else None,
        queue_deadline_s=now_s + rng.uniform(0.0, 1.0) if rng.random() < 0.15 else None,
        use_prefix_cache=rng.random() < 0.9,
        stop_token_ids=frozenset(rng.sample(range(97), 3)),
        min_tokens=rng.choice([0, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


class Client:
    """Sends one request, may lose interest on the way, and judges the answer."""

    def __init__(self, h: House, rng: random.Random) -> None:
        self.h = h
        self.rng = rng
        self.request = random_request(rng, h.clock.now())
        self.outputs: list[list[int]] = [[] for _ in range(self.request.num_choices)]
        self.reasons: dict[int, FinishReason] = {}
        self.num_refusals = 0

    async def run(self) -> RequestHandle:
        await turns(self.rng.randrange(1200))
        handle = await self.submit()
        whim = self.rng.random()
        if whim < 0.1:
            await turns(self.rng.randrange(60))
            handle.cancel()
        async for events in handle:
            for event in events:
                assert event.choice not in self.reasons
                self.outputs[event.choice] += event.token_ids
                if event.finish_reason is not None:
                    self.reasons[event.choice] = event.finish_reason
            if whim > 0.9:
                handle.finish(self.rng.randrange(self.request.num_choices))
            if 0.8 < whim < 0.85:
                handle.cancel()
        return handle

    async def submit(self) -> RequestHandle:
        while True:
            try:
                return self.h.scheduler.submit(self.request)
            except QueueFull:
                self.num_refusals += 1
                await turns(20)

    def judge(self, handle: RequestHandle) -> None:
        assert sorted(self.reasons) == list(range(self.request.num_choices))
        for choice, output in enumerate(self.outputs):
            expected = reference_tokens(self.request, choice)
            assert output == expected[: len(output)]
            if self.reasons[choice] is FinishReason.LENGTH:
                assert len(output) == self.request.max_tokens
        if self.request.sampling.prompt_logprobs is not None and any(self.outputs):
            assert [lp.token_id for lp in handle.prompt_logprobs] == list(self.request.prompt_ids[1:])


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def storm(
    seed: int, num_requests: int, engine: dict[str, Any], *, meant_to_preempt: bool = True, **settings: Any
) -> list[Client]:
    """Let it rain; give the clients for a closer look."""
    limits = {"max_num_batched_tokens": 13, "max_num_seqs": 6, "max_num_queued_reqs": 20}
    settings = limits | {"forecast_admission": False} | settings
    rng = random.Random(seed)
    async with house(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, engine=engine, **settings) as h:
        clients = [Client(h, random.Random(rng.random())) for _ in range(num_requests)]
        async with asyncio.timeout(60):
            handles = await asyncio.gather(*(client.run() for client in clients))
        for client, handle in zip(clients, handles, strict=True):
            client.judge(handle)
        ended = sorted(report.request.request_id for report in h.watcher.ends)
        assert ended == sorted(client.request.request_id for client in clients)
        delivered = sum(len(output) for client in clients for output in client.outputs)
        assert sum(report.num_output_tokens for report in h.watcher.ends) == delivered
        assert h.watcher.preempted or not meant_to_preempt
        most = settings.get("max_preemptions", SchedulerConfig().max_preemptions)
        assert all(end.num_preemptions <= most * end.request.num_choices for end in h.watcher.ends)
    return clients


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_is_answered_and_leaves_every_block_free(seed: int, policy: SchedulingPolicy) -> None:
    clients = await storm(seed, 300, {"num_drafts": seed % 3}, policy=policy)
    assert {reason for client in clients for reason in client.reasons.values()} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.DEADLINE,
    }
    assert any(client.num_refusals for client in clients)


@pytest.mark.parametrize(
    ("settings", "meant_to_preempt"),
    [
        ({"max_num_batched_tokens": 1}, False),
        ({"enable_prefix_caching": False}, True),
        ({"max_num_seqs": 1}, False),
        ({"forecast_admission": True}, False),
        ({"max_preemptions": 1}, True),
        ({"max_preemptions": 1, "policy": SchedulingPolicy.PRIORITY, "max_num_batched_tokens": 3}, True),
    ],
)
async def test_a_storm_under_other_settings(settings: dict[str, Any], meant_to_preempt: bool) -> None:
    await storm(11, 150, {}, meant_to_preempt=meant_to_preempt, **settings)


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_with_a_failing_engine(seed: int) -> None:
    rng = random.Random(seed)

    def fail(batch: Batch) -> None:
        if rng.random() < 0.03:
            raise rng.choice([StepError, RuntimeError])("the weather")

    def row_error(row: Row, token_ids: list[int]) -> str | None:
        return "a bad row" if rng.random() < 0.005 else None

    engine = {"fail": fail, "row_error": row_error}
    clients = await storm(seed, 300, engine, max_engine_failures=10)
    failed = [c for c in clients if FinishReason.FAILED in c.reasons.values()]
    assert 0 < len(failed) < len(clients)
