"""A sequence's blocks: growing, shrinking, forking, copying on write."""

import pytest

from kvpool.errors import OutOfBlocks
from kvpool.pool import BlockPool
from kvpool.table import BlockCopy, BlockTable, blocks_for


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert blocks_for(num_tokens, 4) == num_blocks


def grown(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool, 4)
    table.prepare_write(0, num_tokens)
    return table


def test_growing_tells_the_first_new_entry() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, 4)
    assert table.prepare_write(0, 6) == (0, [])
    assert (len(table.block_ids), table.capacity) == (2, 8)
    assert table.prepare_write(6, 8) == (2, [])
    assert table.prepare_write(8, 9) == (2, [])
    assert len(table.block_ids) == 3


def test_truncating_gives_back_whole_blocks() -> None:
    pool = BlockPool(8)
    table = grown(pool, 12)
    table.truncate(5)
    assert (len(table.block_ids), pool.num_available) == (2, 6)
    table.release()
    assert (table.block_ids, pool.num_available) == ([], 8)


def test_a_fork_shares_all_and_copies_only_what_it_writes() -> None:
    pool = BlockPool(8)
    parent = grown(pool, 10)
    child = parent.fork()
    assert pool.num_available == 5
    assert child.needed_for(10, 11) == 1
    before = list(parent.block_ids)
    first_changed, copies = child.prepare_write(10, 11)
    assert (first_changed, copies) == (2, [BlockCopy(before[2], child.block_ids[2])])
    assert child.block_ids[:2] == parent.block_ids[:2] == before[:2]
    assert child.block_ids[2] != parent.block_ids[2]
    assert parent.prepare_write(10, 11) == (3, []), "the last holder writes in place"


def test_writing_across_shared_and_missing_blocks() -> None:
    pool = BlockPool(8)
    parent = grown(pool, 8)
    child = parent.fork()
    assert child.needed_for(3, 13) == 4
    first_changed, copies = child.prepare_write(3, 13)
    assert first_changed == 0
    assert [c.source_id for c in copies] == parent.block_ids
    assert len(set(child.block_ids) | set(parent.block_ids)) == 6


def test_running_out_changes_nothing() -> None:
    pool = BlockPool(3)
    parent = grown(pool, 8)
    child = parent.fork()
    before = list(child.block_ids)
    with pytest.raises(OutOfBlocks):
        child.prepare_write(7, 9)
    assert child.block_ids == before
    assert [pool.ref_count(b) for b in before] == [2, 2]
    pool.check()


@pytest.mark.parametrize("start", range(12))
@pytest.mark.parametrize("length", range(1, 8))
def test_needed_for_is_what_prepare_write_takes(start: int, length: int) -> None:
    pool = BlockPool(16)
    parent = grown(pool, 10)
    child = parent.fork()
    child.prepare_write(0, 2)
    needed, available = child.needed_for(start, start + length), pool.num_available
    child.prepare_write(start, start + length)
    assert available - pool.num_available == needed
    assert child.needed_for(start, start + length) == 0


def test_only_an_empty_table_adopts() -> None:
    pool = BlockPool(4)
    parent = grown(pool, 4)
    child = BlockTable(pool, 4)
    child.adopt(parent.block_ids)
    assert pool.ref_count(parent.block_ids[0]) == 2
    with pytest.raises(AssertionError):
        child.adopt(parent.block_ids)
