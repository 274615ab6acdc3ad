"""Blocks that leave the pool and come back: what is saved when, who waits for what, and that nobody else does."""

import asyncio

import pytest

from kvpool.prefix import extend_chain, namespace_root
from kvpool.tier import HostTier
from scheduler.handle import RequestHandle
from scheduler.offload import MAX_FETCHES, Backing
from scheduler.request import Request
from tests.fakes.engine import reference_tokens
from tests.fakes.tier import SlowTier
from tests.scheduler.harness import House, house, read, request


def long_request(number: int, num_prompt: int = 32, max_tokens: int = 4) -> Request:
    """Prompts that share nothing."""
    return request([number * 7 % 97, *range(num_prompt - 1)], max_tokens, cache_namespace=namespace_root(str(number)))


async def evict(h: House, first: int = 100) -> None:
    """Fill the pool with other prompts."""
    for number in range(first, first + 2 * h.pool.num_blocks // 9 + 1):
        await h.answer(long_request(number))


async def tokens_of(handle: RequestHandle) -> list[int]:
    [answer] = await read(handle)
    return answer.token_ids


async def test_an_evicted_prefix_comes_back_from_the_tier() -> None:
    async with house(num_blocks=24, backing=Backing(HostTier(1 << 20))) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        before = h.engine.num_steps
        handle = h.scheduler.submit(r)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 31
        assert h.engine.batches[before].num_tokens == 1
        assert h.watcher.lookups[-1] == (32, 31)
        [stats] = h.scheduler.stats().tiers
        assert stats.num_loaded == 8


async def test_without_a_tier_it_is_computed_again() -> None:
    async with house(num_blocks=24) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        handle = h.scheduler.submit(r)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 0
        assert not any(b.saves or b.loads for b in h.engine.batches)


async def test_only_what_is_missing_is_read_and_what_is_missing_in_the_middle_ends_it() -> None:
    tier = SlowTier(lag=False)
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        for number in (100, 101):  # evicts the tail of the first prompt, children first
            await h.answer(long_request(number))
        handle = h.scheduler.submit(r)
        await tokens_of(handle)
        num_loads = sum(len(b.loads) for b in h.engine.batches)
        assert 0 < num_loads < 8
        assert handle.num_cached_tokens == 31
        await evict(h)
        digests: list[bytes] = []
        extend_chain(r.cache_namespace, digests, r.prompt_ids, 4)
        tier.lose(digests[3])
        handle = h.scheduler.submit(r)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 3 * 4


async def test_who_waits_for_blocks_holds_no_step_and_nobody_up() -> None:
    tier = SlowTier()
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        waiting = h.scheduler.submit(r)
        other = long_request(2, 8)
        assert await h.answer(other)
        assert (waiting.is_done, len(tier.reads)) == (False, 1)
        assert h.scheduler.stats().num_waiting == 1
        assert waiting.times.scheduled_s is None
        steps = h.engine.num_steps
        await h.turns()
        assert h.engine.num_steps == steps, "an idle engine is not stepped"
        tier.finish()
        assert await tokens_of(waiting) == reference_tokens(r)
        assert waiting.num_cached_tokens == 31


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_what_could_not_be_read_is_computed(num_read: int) -> None:
    tier = SlowTier()
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        handle = h.scheduler.submit(r)
        await h.turns()
        tier.finish(num_read)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 4 * num_read
        assert not tier.reads, "nobody asks twice"


async def test_a_read_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.offload.FETCH_TIMEOUT_S", 0.01)
    tier = SlowTier()
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        handle = h.scheduler.submit(r)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 0
        tier.finish()  # too late, and harmless
        await h.turns()


async def test_cancelling_while_waiting_for_blocks_ends_it_at_once() -> None:
    tier = SlowTier()
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        handle = h.scheduler.submit(r)
        await h.turns()
        handle.cancel()
        assert handle.is_done
        tier.finish()
        await h.turns()
        assert h.scheduler.stats().num_waiting == 0


async def test_a_crowd_behind_one_prefix_reads_it_a_few_times_and_holds_it_once() -> None:
    tier = SlowTier()
    async with house(num_blocks=40, max_num_seqs=32, backing=Backing(tier), forecast_admission=False) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        namespace = r.cache_namespace
        crowd = [
            h.scheduler.submit(request([*r.prompt_ids, n, n, n], 3, seed=n, cache_namespace=namespace))
            for n in range(20)
        ]
        await h.turns()
        assert len(tier.reads) == MAX_FETCHES
        for _ in range(MAX_FETCHES):
            tier.finish()
        await h.turns()
        for handle in crowd:
            while not handle.is_done:
                await asyncio.sleep(0)
                while tier.reads:
                    tier.finish()
            assert await tokens_of(handle) == reference_tokens(handle.request)
            assert handle.num_cached_tokens == 32
        assert sum(len(b.loads) for b in h.engine.batches) <= MAX_FETCHES * 8


async def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    settings = {"num_blocks": 12, "forecast_admission": False, "max_preemptions": 3}
    async with house(backing=Backing(HostTier(1 << 20)), **settings) as h:
        requests = [long_request(number, 12, 24) for number in range(3)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert h.watcher.preempted
        assert any(b.loads for b in h.engine.batches)


async def test_an_idle_engine_saves_for_a_durable_tier_what_a_crash_would_lose() -> None:
    tier = SlowTier(is_durable=True, lag=False)
    async with house(backing=Backing(tier)) as h:
        await h.answer(r := request(40, 8))
        async with asyncio.timeout(5):
            while h.scheduler.stats().tiers[0].num_blocks < 11:  # noqa: ASYNC110  gives the loop its turns
                await asyncio.sleep(0)
        assert not any(b.saves for b in h.engine.batches if b.rows), "nothing was evicted"
        assert len(h.watcher.steps) == sum(bool(b.rows) for b in h.engine.batches), "saving is no step to report"
    async with house(backing=Backing(tier)) as h:  # a new pool, a new engine
        handle = h.scheduler.submit(r)
        assert await tokens_of(handle) == reference_tokens(r)
        assert handle.num_cached_tokens == 39


async def test_an_idle_engine_waits_for_a_busy_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.offload.RETRY_S", 0.001)
    tier = SlowTier(is_durable=True, lag=False)
    tier.is_accepting = False
    async with house(backing=Backing(tier)) as h:
        await h.answer(request(40, 8))
        await h.turns()
        assert h.scheduler.stats().tiers[0].num_blocks == 0
        tier.is_accepting = True
        async with asyncio.timeout(5):
            while h.scheduler.stats().tiers[0].num_blocks < 11:  # noqa: ASYNC110  gives the loop its turns
                await asyncio.sleep(0.001)


async def test_prompt_logprobs_and_switched_off_lookups_read_nothing() -> None:
    tier = SlowTier(lag=False)
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        for fields in ({"use_prefix_cache": False}, {"prompt_logprobs": 0}):
            await h.answer(request(r.prompt_ids, 2, cache_namespace=r.cache_namespace, **fields))
        assert not any(b.loads for b in h.engine.batches)


async def test_draining_waits_for_those_that_wait_for_blocks() -> None:
    tier = SlowTier()
    async with house(num_blocks=24, backing=Backing(tier)) as h:
        await h.answer(r := long_request(1))
        await evict(h)
        handle = h.scheduler.submit(r)
        await h.turns()
        h.scheduler.drain()
        await h.turns()
        assert not h.task.done()
        tier.finish()
        assert await tokens_of(handle) == reference_tokens(r)
        await asyncio.wait_for(h.task, 5)
