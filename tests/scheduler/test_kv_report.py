"""What the scheduler says of its pool: waste to the token, hits, ages and sharing, and explanations of misses."""

import asyncio

from kvpool.journal import POOLS_REMEMBERED, Miss, MissReason
from kvpool.prefix import namespace_root
from scheduler.kv_report import unused_slots
from tests.scheduler.harness import House, house, request

SIZE = 4


async def explained(home: House, prompt: list[int], **fields: object) -> tuple[int, Miss | None]:
    handle = home.scheduler.submit(request(prompt, 1, explain_cache=True, **fields))
    async for _ in handle:
        pass
    return handle.num_cached_tokens, handle.cache_miss


async def test_an_idle_pool_wastes_nothing() -> None:
    async with house() as home:
        report = home.scheduler.kv_report()
        assert (report.num_unused_slots, report.waste, report.hit_rate) == (0, 0.0, 0.0)
        assert report.ages_s == ()
        assert report.shared == ()


async def test_waste_is_the_ends_of_the_last_blocks() -> None:
    async with house(engine={"gate": asyncio.Event()}, max_steps_in_flight=1) as home:
        handles = [home.scheduler.submit(request([n] * length, 4)) for n, length in ((1, 9), (2, 8), (3, 3))]
        await home.steps(1)
        report = home.scheduler.kv_report()
        assert report.pool.num_referenced == 3 + 2 + 1
        assert report.num_unused_slots == 3 + 0 + 1
        assert report.waste == 4 / 24
        home.engine.gate.set()
        await asyncio.gather(*(_drained(handle) for handle in handles))


async def _drained(handle: object) -> None:
    async for _ in handle:  # type: ignore[attr-defined]  a RequestHandle
        pass


async def test_a_shared_block_is_wasted_once() -> None:
    async with house() as home:
        parent = home.scheduler._roster.running.new_table()  # tables as forks hold them, without a loop in between
        parent.prepare_write(0, 6)
        child = parent.fork()

        class Fake:
            def __init__(self, table: object) -> None:
                self.table, self.tokens = table, [0] * 6

        assert unused_slots([Fake(parent), Fake(child)]) == 2  # type: ignore[list-item]  has what is read
        for table in (parent, child):
            table.release()


async def test_hits_ages_and_shared_prefixes() -> None:
    async with house() as home:
        prompt = list(range(1, 13))
        await home.answer(request([*prompt, 50], 1))
        home.clock.advance(5.0)
        for last in (51, 52, 53):
            await home.answer(request([*prompt, last], 1))
        report = home.scheduler.kv_report(num_shared=1)
        assert (report.num_queried_tokens, report.num_hit_tokens) == (4 * 13, 3 * 12)
        assert report.hit_rate == 36 / 52
        [use] = report.shared
        assert (use.num_blocks, use.num_hits, use.num_holders) == (3, 3, 0)
        assert len(report.ages_s) == report.pool.num_cached == 3
        assert min(report.ages_s) > 5.0


async def test_explained_misses() -> None:
    model, salted = namespace_root("m"), namespace_root("m", "salt")
    here = {"cache_namespace": namespace_root("m", ""), "cache_scope": model}
    async with house(num_blocks=8) as home:
        prompt = list(range(1, 11))
        assert await explained(home, prompt, **here) == (0, Miss(MissReason.NEVER_SEEN, 0))
        assert await explained(home, prompt, **here) == (8, None)
        assert await explained(home, [*prompt[:6], 99, 98], **here) == (4, Miss(MissReason.NEVER_SEEN, 6))
        assert await explained(home, prompt[:3], **here) == (0, Miss(MissReason.TOO_SHORT, 0))
        there = {"cache_namespace": salted, "cache_scope": model}
        assert await explained(home, prompt, **there) == (0, Miss(MissReason.SALT, 0))
        other = {"cache_namespace": namespace_root("x"), "cache_scope": namespace_root("x")}
        assert await explained(home, prompt, **other) == (0, Miss(MissReason.ADAPTER, 0))
        await home.answer(request(list(range(200, 230)), 1))  # all eight blocks
        assert await explained(home, prompt, **here) == (0, Miss(MissReason.EVICTED, 0))
        assert await explained(home, prompt, use_prefix_cache=False, **here) == (0, Miss(MissReason.NOT_ASKED, 0))


async def test_nothing_is_explained_unasked() -> None:
    async with house() as home:
        handle = home.scheduler.submit(request(10, 1))
        await _drained(handle)
        assert handle.cache_miss is None


async def test_without_a_cache_nobody_is_asked() -> None:
    async with house(enable_prefix_caching=False) as home:
        assert await explained(home, list(range(10))) == (0, Miss(MissReason.NOT_ASKED, 0))


async def test_evictions_are_remembered_for_some_pools_and_no_longer() -> None:
    here = {"cache_namespace": namespace_root("m", ""), "cache_scope": namespace_root("m")}
    async with house(num_blocks=8) as home:
        first, later = [1] * 10, [[number] * 10 for number in range(2, 14)]
        for prompt in (first, *later):
            await explained(home, prompt, **here)
        assert await explained(home, first, **here) == (0, Miss(MissReason.EVICTED, 0))
        for number in range(100, 100 + POOLS_REMEMBERED * 8 // 2):
            await explained(home, [number] * 10, **here)
        assert await explained(home, later[0], **here) == (0, Miss(MissReason.NEVER_SEEN, 0))
