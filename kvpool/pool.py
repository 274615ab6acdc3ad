"""The owner of all KV block ids: reference counts, free blocks, and blocks kept only for the prefix cache.

Knows block ids and nothing else: no tokens, hashes, models or requests. A block is in exactly one of three states:

    free         nobody refers to it, its content means nothing      -> `_free` (a stack)
    cached       nobody refers to it, the prefix index can find it   -> `_cached` (an eviction policy's order)
    referenced   one or more tables hold it                          -> `_refs[id] > 0`

`free + cached + referenced == num_blocks`, always.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.errors import OutOfBlocks
from kvpool.eviction import EvictionPolicy, LeastRecentlyUsed


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of the pool, in blocks. `evictions` counts cached blocks that were reused since the start."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    evictions: int

    @property
    def usage(self) -> float:
        """Share of blocks that tables hold, 0..1. Blocks kept only for the prefix cache do not count."""
        return self.num_referenced / self.num_blocks if self.num_blocks else 0.0


class BlockPool:
    """Reference-counted block ids `0..num_blocks-1`; every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._findable = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: EvictionPolicy = LeastRecentlyUsed()
        self._evictions = 0
        self._on_evict: Callable[[int], None] | None = None

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones plus cached ones it may evict."""
        return len(self._free) + len(self._cached)

    @property
    def num_spare(self) -> int:
        """The same without cached blocks that the eviction policy wants kept."""
        return self.num_available - self._cached.num_kept

    def set_eviction_policy(self, policy: EvictionPolicy) -> None:
        """Have `policy` order the cached blocks from now on; before the first block is cached."""
        assert not len(self._cached), "the order of cached blocks would be lost"
        self._cached = policy

    def set_evict_listener(self, listener: Callable[[int], None]) -> None:
        """Call `listener(block_id)` just before a cached block is reused; the prefix index forgets it there."""
        assert self._on_evict is None, "a pool has one prefix index"
        self._on_evict = listener

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached ones if needed.

        Raises:
            OutOfBlocks: fewer than `count` are available; nothing changes then.
        """
        if count > self.num_available:
            raise OutOfBlocks(count, self.num_available)
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, waking cached ones. A free block cannot be shared."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                assert self._findable[block_id], f"block {block_id} is free and cannot be shared"
                self._cached.remove(block_id)
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each block of a table, given in table order.

        Walks from the tail, so that within one table children become older than their parents and are evicted first.
        """
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} released twice"
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._retire(block_id)

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._refs[block_id]

    def set_findable(self, block_id: int, findable: bool) -> None:
        """Told by the prefix index: whether the block's content can still be found once nobody refers to it."""
        if self._findable[block_id] == findable:
            return
        self._findable[block_id] = findable
        if findable:
            return
        self._cached.forget(block_id)
        if self._refs[block_id] == 0:
            self._cached.remove(block_id)
            self._free.append(block_id)

    def is_findable(self, block_id: int) -> bool:
        """Whether the prefix index knows the block."""
        return self._findable[block_id]

    def stats(self) -> PoolStats:
        """A snapshot for metrics and tests."""
        num_free, num_cached = len(self._free), len(self._cached)
        referenced = self.num_blocks - num_free - num_cached
        return PoolStats(self.num_blocks, num_free, num_cached, referenced, self._evictions)

    def check(self) -> None:
        """Assert the pool's invariants in O(num_blocks); for tests and for debug runs when idle."""
        free = set(self._free)
        cached = {block_id for block_id in range(self.num_blocks) if block_id in self._cached}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(cached) == len(self._cached), "the eviction policy knows blocks that do not exist"
        assert not free & cached, "a block is both free and cached"
        for block_id in range(self.num_blocks):
            refs, findable = self._refs[block_id], self._findable[block_id]
            assert refs >= 0, f"block {block_id} has {refs} references"
            assert (block_id in free) == (refs == 0 and not findable), f"block {block_id} is in the wrong state"
            assert (block_id in cached) == (refs == 0 and findable), f"block {block_id} is in the wrong state"

    def _retire(self, block_id: int) -> None:
        if self._findable[block_id]:
            self._cached.add(block_id)
        else:
            self._free.append(block_id)

    def _evict(self) -> int:
        block_id = self._cached.pop()
        self._cached.forget(block_id)
        self._findable[block_id] = False
        if self._on_evict is not None:
            self._on_evict(block_id)
        self._evictions += 1
        return block_id
