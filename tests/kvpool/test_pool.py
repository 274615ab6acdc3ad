"""Block ids: states, reference counts, eviction order."""

import pytest

from kvpool.errors import OutOfBlocks
from kvpool.pool import BlockPool


def cached_blocks(pool: BlockPool, count: int) -> list[int]:
    """Take blocks, make them findable, give them back."""
    block_ids = pool.take(count)
    for block_id in block_ids:
        pool.set_findable(block_id, True)
    pool.release(block_ids)
    return block_ids


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(4)
    block_ids = pool.take(4)
    assert sorted(block_ids) == [0, 1, 2, 3]
    assert pool.num_available == 0
    pool.release(block_ids)
    assert pool.num_available == 4
    pool.check()


def test_taking_too_many_changes_nothing_and_says_both_numbers() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocks) as error:
        pool.take(3)
    assert (error.value.needed, error.value.available) == (3, 2)
    assert pool.stats().num_free == 2
    pool.check()


def test_a_shared_block_comes_back_with_its_last_holder() -> None:
    pool = BlockPool(2)
    [block_id] = pool.take(1)
    pool.share([block_id])
    assert pool.ref_count(block_id) == 2
    pool.release([block_id])
    assert pool.stats().num_referenced == 1
    pool.release([block_id])
    assert pool.stats().num_free == 2


def test_findable_blocks_are_kept_and_can_be_woken() -> None:
    pool = BlockPool(3)
    block_ids = cached_blocks(pool, 2)
    stats = pool.stats()
    assert (stats.num_free, stats.num_cached, stats.num_referenced, stats.usage) == (1, 2, 0, 0.0)
    pool.share(block_ids[:1])
    assert pool.stats().num_cached == 1
    assert pool.is_findable(block_ids[0])
    pool.check()


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(3)
    block_ids = cached_blocks(pool, 2)
    assert pool.take(1)[0] not in block_ids
    assert pool.stats().evictions == 0


def test_eviction_is_oldest_first_and_children_before_parents() -> None:
    evicted: list[int] = []
    pool = BlockPool(4)
    pool.set_evict_listener(evicted.append)
    old, new = cached_blocks(pool, 2), cached_blocks(pool, 2)
    pool.take(4)
    assert evicted == [old[1], old[0], new[1], new[0]]
    assert pool.stats().evictions == 4
    assert not any(pool.is_findable(block_id) for block_id in evicted)
    pool.check()


def test_use_makes_a_cached_block_young_again() -> None:
    evicted: list[int] = []
    pool = BlockPool(2)
    pool.set_evict_listener(evicted.append)
    first = cached_blocks(pool, 1)
    cached_blocks(pool, 1)
    pool.share(first)
    pool.release(first)
    pool.take(1)
    assert evicted != first


def test_a_block_made_unfindable_while_cached_becomes_free() -> None:
    pool = BlockPool(1)
    [block_id] = cached_blocks(pool, 1)
    pool.set_findable(block_id, False)
    assert pool.stats().num_free == 1
    pool.check()


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    block_ids = pool.take(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError):
        pool.release(block_ids)
    with pytest.raises(AssertionError):
        pool.share(block_ids)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
