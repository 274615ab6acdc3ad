"""The prefix index: what a digest names, what is found, and what is forgotten."""

import pytest

from kvpool.pool import BlockPool
from kvpool.prefix import NullPrefixListener, PrefixBlock, PrefixIndex, chain, extend_chain, namespace_root

ROOT = namespace_root("model")


def digests_of(token_ids: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(root, digests, token_ids, block_size)
    return digests


def publish(index: PrefixIndex, digests: list[bytes], block_ids: list[int]) -> list[int | None]:
    """Publish the blocks of one prefix, first block first."""
    parents = [None, *digests]
    triples = zip(digests, parents, block_ids, strict=False)
    return [index.publish(PrefixBlock(digest, parent, (1, 2, 3, 4)), i) for digest, parent, i in triples]


class Diary(NullPrefixListener):
    """What an index told."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes]] = []

    def on_stored(self, block: PrefixBlock) -> None:
        self.entries.append(("stored", block.digest))

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        self.entries.append(("evicted", digest))

    def on_removed(self, digest: bytes) -> None:
        self.entries.append(("removed", digest))

    def on_cleared(self) -> None:
        self.entries.append(("cleared", b""))


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
    assert publish(index, digests[:2], block_ids) == block_ids[:2]
    assert index.match(digests) == block_ids[:2]
    assert index.match(digests[1:]) == block_ids[1:2]
    assert index.match(digests_of([7] * 8)) == []
    index.check()


def test_one_block_per_prefix() -> None:
    pool = BlockPool(4)
    index, [digest] = PrefixIndex(pool), digests_of([1, 2, 3, 4])
    first, second = pool.take(2)
    assert publish(index, [digest], [first]) == [first]
    assert publish(index, [digest], [first]) == [first]
    assert publish(index, [digest], [second]) == [first]
    assert index.match([digest]) == [first]
    pool.release([first, second])
    assert (pool.stats().num_cached, pool.stats().num_free) == (1, 3)


def test_evicted_blocks_are_forgotten() -> None:
    pool = BlockPool(2)
    index, digests = PrefixIndex(pool), digests_of(list(range(8)))
    block_ids = pool.take(2)
    publish(index, digests, block_ids)
    pool.release(block_ids)
    pool.take(1)
    assert index.match(digests) == block_ids[:1], "the child went first"
    assert len(index) == 1
    index.check()


def test_forget_and_clear() -> None:
    pool = BlockPool(3)
    index, digests = PrefixIndex(pool), digests_of(list(range(12)))
    block_ids = pool.take(3)
    publish(index, digests, block_ids)
    index.forget(block_ids[1])
    index.forget(block_ids[1])
    assert index.match(digests) == block_ids[:1]
    assert len(index) == 1, "what followed it can't be found any more"
    index.check()
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
        publish(index, digests, [1 - block_id])
    publish(index, digests, [block_id])
    with pytest.raises(AssertionError, match="another prefix"):
        publish(index, digests, [block_id, block_id])


def test_a_block_whose_parent_is_not_known_is_not_published() -> None:
    pool = BlockPool(3)
    index, digests = PrefixIndex(pool), digests_of(list(range(8)))
    block_ids = pool.take(2)
    assert index.publish(PrefixBlock(digests[1], digests[0], (4, 5, 6, 7)), block_ids[1]) is None
    assert not pool.is_findable(block_ids[1])
    assert publish(index, digests, block_ids) == block_ids
    index.check()


def test_evicting_a_parent_before_its_children_forgets_them_too() -> None:
    """Nobody does that who holds ancestors with their descendants; the index stays right even so."""
    diary, pool = Diary(), BlockPool(4)
    index, digests = PrefixIndex(pool, diary), digests_of(list(range(12)))
    block_ids = pool.take(3)
    publish(index, digests, block_ids)
    pool.release(block_ids[:1])  # the parent alone: it is the oldest now
    pool.release([block_ids[2]])
    pool.take(2)
    assert len(index) == 0
    assert diary.entries[3:] == [
        *(("removed", digest) for digest in (digests[2], digests[1])),
        ("evicted", digests[0]),
        ("removed", digests[0]),
    ]
    index.check()
    pool.check()


def test_listeners_hear_of_every_change_in_order() -> None:
    diary, pool = Diary(), BlockPool(3)
    index, digests = PrefixIndex(pool, diary), digests_of(list(range(8)))
    block_ids = pool.take(2)
    publish(index, digests, block_ids)
    pool.release(block_ids)
    pool.take(2)
    index.clear()
    assert [what for what, _ in diary.entries] == ["stored", "stored", "evicted", "removed", "cleared"]
    assert {digest for _, digest in diary.entries[2:4]} == {digests[1]}
