"""Pinned prefixes: what survives pressure, what the budget costs, and who loses first."""

from itertools import takewhile

from kvpool.pins import PrefixPins
from kvpool.pool import BlockPool
from kvpool.prefix import PrefixBlock, PrefixIndex, extend_chain, namespace_root
from kvpool.table import BlockTable

SIZE = 4


class House:
    """A pool with an index and pins; `visit` is what a request does."""

    def __init__(self, num_blocks: int, budget: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pins = PrefixPins(budget)
        self.pool.set_eviction_policy(self.pins)
        self.index = PrefixIndex(self.pool)

    def digests(self, name: str, num_blocks: int) -> list[bytes]:
        digests: list[bytes] = []
        extend_chain(namespace_root(name), digests, range(num_blocks * SIZE), SIZE)
        return digests

    def visit(self, name: str, num_blocks: int, key: str | None = None) -> int:
        """Use the prefix `name` and leave it in the cache; gives how many of its blocks were found there."""
        digests = self.digests(name, num_blocks)
        table = BlockTable(self.pool, SIZE)
        table.adopt(self.index.match(digests))
        num_found = len(table.block_ids)
        table.prepare_write(num_found * SIZE, num_blocks * SIZE)
        for digest, parent, block_id in zip(digests, [None, *digests], table.block_ids, strict=False):
            self.index.publish(PrefixBlock(digest, parent, ()), block_id)
        if key is not None:
            self.pins.pin(key, list(takewhile(self.pool.is_findable, table.block_ids)))
        table.release()
        self.pool.check()
        self.index.check()
        assert self.pins.num_pinned <= self.pins.budget
        return num_found

    def found(self, name: str, num_blocks: int) -> int:
        return len(self.index.match(self.digests(name, num_blocks)))


def test_a_pinned_prefix_survives_what_evicts_an_unpinned_one() -> None:
    h = House(8, 3)
    h.visit("pinned", 3, "k")
    h.visit("other", 3)
    for number in range(10):
        h.visit(f"noise {number}", 4)
    assert (h.found("pinned", 3), h.found("other", 3)) == (3, 0)
    assert h.pool.num_available - h.pool.num_spare == 3


def test_without_a_budget_nothing_is_pinned() -> None:
    h = House(8, 0)
    h.visit("pinned", 3, "k")
    h.visit("noise", 6)
    assert h.found("pinned", 3) < 3
    assert h.pins.keys == ()


def test_the_key_unused_for_longest_loses_first_and_its_children_first() -> None:
    h = House(16, 6)
    h.visit("a", 3, "a")
    h.visit("b", 3, "b")
    h.visit("a", 3, "a")
    h.visit("c", 2, "c")
    assert h.pins.keys == ("b", "a", "c")
    for number in range(10):
        h.visit(f"noise {number}", 5)
    assert [h.found("a", 3), h.found("b", 3), h.found("c", 2)] == [3, 1, 2]


def test_of_a_prefix_larger_than_the_budget_its_beginning_stays() -> None:
    h = House(12, 3)
    h.visit("long", 8, "k")
    for number in range(10):
        h.visit(f"noise {number}", 6)
    assert h.found("long", 8) == 3


def test_two_keys_share_a_pinned_block_and_either_keeps_it() -> None:
    h = House(12, 4)
    h.visit("shared", 2, "a")
    h.visit("shared", 2, "b")
    assert h.pins.num_pinned == 2
    h.visit("c", 4, "c")
    assert h.pins.keys == ("c",)
    h.visit("shared", 2, "a")
    for number in range(10):
        h.visit(f"noise {number}", 6)
    assert (h.found("shared", 2), h.found("c", 4)) == (2, 2)


def test_where_nothing_else_is_left_a_pinned_block_goes_and_its_pin_with_it() -> None:
    h = House(4, 3)
    h.visit("pinned", 3, "k")
    h.visit("huge", 4)
    assert h.found("pinned", 3) == 0
    assert (h.pins.keys, h.pins.num_pinned, h.pool.num_spare) == ((), 0, 4)


def test_a_forgotten_block_is_no_longer_pinned() -> None:
    h = House(4, 3)
    h.visit("pinned", 3, "k")
    h.index.clear()
    assert (h.pins.keys, h.pins.num_pinned, h.pool.stats().num_free) == ((), 0, 4)
