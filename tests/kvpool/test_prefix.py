"""The prefix index: what a digest names, what is found, and what is forgotten."""

import pytest

from kvpool.pool import BlockPool
from kvpool.prefix import PrefixIndex, chain, extend_chain, namespace_root

ROOT = namespace_root("model")


def digests_of(token_ids: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(root, digests, token_ids, block_size)
    return digests


def test_a_namespace_is_its_parts_not_their_concatenation() -> None:
    roots = {namespace_root(*parts) for parts in [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ()]}
    assert len(roots) == 5
    assert namespace_root("ab", "c") == namespace_root("ab", "c")


def test_a_digest_names_the_whole_prefix() -> None:
    one, other = digests_of([1, 2, 3, 4, 5, 6, 7, 8]), digests_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert digests_of([1, 2, 3, 4, 5, 6, 7, 8], root=namespace_root("other"))[1] != one[1]


def test_a_chain_grows_by_full_blocks_only() -> None:
    digests: list[bytes] = []
    for length in range(13):
        extend_chain(ROOT, digests, list(range(length)), 4)
        assert len(digests) == length // 4
    assert digests == digests_of(list(range(12)))
    assert digests[1] == chain(digests[0], [4, 5, 6, 7])


def test_the_longest_known_prefix_is_found() -> None:
    pool = BlockPool(4)
    index, digests = PrefixIndex(pool), digests_of(list(range(12)))
    block_ids = pool.take(3)
    for digest, block_id in zip(digests[:2], block_ids, strict=False):
        assert index.publish(digest, block_id)
    assert index.match(digests) == block_ids[:2]
    assert index.match(digests[1:]) == block_ids[1:2]
    assert index.match(digests_of([7] * 8)) == []
    index.check()


def test_one_block_per_prefix() -> None:
    pool = BlockPool(4)
    index, [digest] = PrefixIndex(pool), digests_of([1, 2, 3, 4])
    first, second = pool.take(2)
    assert index.publish(digest, first)
    assert index.publish(digest, first)
    assert not index.publish(digest, second)
    assert index.match([digest]) == [first]
    pool.release([first, second])
    assert (pool.stats().num_cached, pool.stats().num_free) == (1, 3)


def test_evicted_blocks_are_forgotten() -> None:
    pool = BlockPool(2)
    index, digests = PrefixIndex(pool), digests_of(list(range(8)))
    block_ids = pool.take(2)
    for digest, block_id in zip(digests, block_ids, strict=True):
        index.publish(digest, block_id)
    pool.release(block_ids)
    pool.take(1)
    assert index.match(digests) == block_ids[:1], "the child went first"
    assert len(index) == 1
    index.check()


def test_forget_and_clear() -> None:
    pool = BlockPool(3)
    index, digests = PrefixIndex(pool), digests_of(list(range(12)))
    block_ids = pool.take(3)
    for digest, block_id in zip(digests, block_ids, strict=True):
        index.publish(digest, block_id)
    index.forget(block_ids[1])
    index.forget(block_ids[1])
    assert index.match(digests) == block_ids[:1]
    pool.release(block_ids)
    index.clear()
    assert (len(index), pool.stats().num_free) == (0, 3)
    index.check()
    pool.check()


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    index, digests = PrefixIndex(pool), digests_of(list(range(8)))
    [block_id] = pool.take(1)
    with pytest.raises(AssertionError, match="by nobody"):
        index.publish(digests[0], 1 - block_id)
    index.publish(digests[0], block_id)
    with pytest.raises(AssertionError, match="another prefix"):
        index.publish(digests[1], block_id)
