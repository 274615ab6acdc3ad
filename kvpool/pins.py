"""Pinned prefixes: blocks under a key survive pressure, within a budget; the least recently used key loses its first.

Knows block ids and keys; knows no requests. Unpinned blocks go in LRU order; pinned ones only where nothing else is
left, so that a budget can never keep the pool from serving a request that fits it. A block may be pinned by several
keys and counts once. A key pins whole prefixes, parents with children, so children still go before their parents.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvpool.eviction import LeastRecentlyUsed


class PrefixPins:
    """An `EvictionPolicy` that keeps the blocks of the keys used last, `budget` blocks in all (0: none)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._loose = LeastRecentlyUsed()
        self._kept = LeastRecentlyUsed()
        self._blocks_of: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self._keys_of: dict[int, set[str]] = {}

    def __len__(self) -> int:
        return len(self._loose) + len(self._kept)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._loose or block_id in self._kept

    @property
    def num_kept(self) -> int:
        """Pinned blocks among the evictable ones."""
        return len(self._kept)

    @property
    def num_pinned(self) -> int:
        """Blocks that keys pin, those in use included; never above `budget`."""
        return len(self._keys_of)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that pin anything, least recently used first."""
        return tuple(self._blocks_of)

    def pin(self, key: str, block_ids: Sequence[int]) -> None:
        """Pin a prefix's findable blocks, first block first, and make `key` the one used last.

        What exceeds the budget is unpinned: of the least recently used key, the blocks it pinned longest ago, children
        before parents. So of a prefix larger than the budget its beginning stays.
        """
        if not self.budget or not block_ids:
            return
        blocks = self._blocks_of.setdefault(key, OrderedDict())
        self._blocks_of.move_to_end(key)
        for block_id in reversed(block_ids):
            self._keys_of.setdefault(block_id, set()).add(key)
            blocks[block_id] = None
            blocks.move_to_end(block_id)
            self._move(block_id, self._loose, self._kept)
        while self.num_pinned > self.budget:
            self._unpin_oldest()

    def add(self, block_id: int) -> None:
        """Put it last among its kind."""
        (self._kept if block_id in self._keys_of else self._loose).add(block_id)

    def remove(self, block_id: int) -> None:
        """Take it out; a pin stays."""
        (self._kept if block_id in self._kept else self._loose).remove(block_id)

    def forget(self, block_id: int) -> None:
        """Drop its pins: the block will hold something else."""
        for key in self._keys_of.pop(block_id, ()):
            del self._blocks_of[key][block_id]
            if not self._blocks_of[key]:
                del self._blocks_of[key]
        self._move(block_id, self._kept, self._loose)

    def pop(self) -> int:
        """Take out the block unused for longest: an unpinned one while there is any."""
        return self._loose.pop() if len(self._loose) else self._kept.pop()

    def _unpin_oldest(self) -> None:
        key, blocks = next(iter(self._blocks_of.items()))
        block_id, _ = blocks.popitem(last=False)
        if not blocks:
            del self._blocks_of[key]
        self._keys_of[block_id].discard(key)
        if not self._keys_of[block_id]:
            del self._keys_of[block_id]
            self._move(block_id, self._kept, self._loose)

    @staticmethod
    def _move(block_id: int, source: LeastRecentlyUsed, target: LeastRecentlyUsed) -> None:
        if block_id in source:
            source.remove(block_id)
            target.add(block_id)
