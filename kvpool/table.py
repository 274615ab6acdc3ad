"""One sequence's blocks, in order: growing, shrinking, forking, and copy-on-write orders.

Knows token counts and block ids; knows no token ids. Position `p` of a sequence lives in block `p // block_size` of its
table, at offset `p % block_size`:

    tokens  0 ........ 15 | 16 ....... 31 | 32 .. 40
    blocks  [     7      ] [     3       ] [   9    ]      (block_size 16, 41 tokens)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.pool import BlockPool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """An order to copy the KV of a whole block, all layers, before a step's writes."""

    source_id: int
    target_id: int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one sequence. Holds one pool reference per entry until `release`."""

    __slots__ = ("_pool", "block_ids", "block_size")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.block_ids: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that fit the blocks held now."""
        return len(self.block_ids) * self.block_size

    def adopt(self, block_ids: Sequence[int]) -> None:
        """Start an empty table with blocks found by the prefix index, taking a reference to each."""
        assert not self.block_ids, "only an empty table can adopt a prefix"
        self._pool.share(block_ids)
        self.block_ids.extend(block_ids)

    def missing(self, num_tokens: int) -> int:
        """How many more blocks are needed to hold `num_tokens` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(self.block_ids))

    def shared_in(self, start: int, end: int) -> int:
        """How many blocks under positions `[start, end)` other tables hold too: each needs a copy before a write."""
        return sum(self._pool.ref_count(self.block_ids[index]) > 1 for index in self._held_range(start, end))

    def needed_for(self, start: int, end: int) -> int:
        """How many blocks `prepare_write(start, end)` takes from the pool: missing ones and copies of shared ones."""
        if end == start + 1:  # a decode step: the common case
            block_ids, index = self.block_ids, start // self.block_size
            is_held = index < len(block_ids)
            return int(self._pool.ref_count(block_ids[index]) > 1) if is_held else index + 1 - len(block_ids)
        return self.missing(end) + self.shared_in(start, end)

    def prepare_write(self, start: int, end: int) -> tuple[int, list[BlockCopy]]:
        """Make positions `[start, end)` writable: copy shared blocks, add missing ones.

        Returns the index of the first table entry that changed (`len(block_ids)` when none did) and the copies to do
        before writing. A block that only this table holds is written in place, found by the index or not: the caller
        never rewrites a position of a published block with other tokens.

        Raises:
            OutOfBlocks: nothing changes then.
        """
        if not self.needed_for(start, end):
            return len(self.block_ids), []
        shared = [i for i in self._held_range(start, end) if self._pool.ref_count(self.block_ids[i]) > 1]
        first_changed = shared[0] if shared else len(self.block_ids)
        fresh = self._pool.take(len(shared) + self.missing(end))
        copies: list[BlockCopy] = []
        for index, target_id in zip(shared, fresh, strict=False):
            source_id = self.block_ids[index]
            copies.append(BlockCopy(source_id, target_id))
            self.block_ids[index] = target_id
            self._pool.release([source_id])
        self.block_ids.extend(fresh[len(shared) :])
        return first_changed, copies

    def replace(self, index: int, block_id: int) -> None:
        """Hold `block_id` instead of the entry at `index`: another block with the same content."""
        self._pool.share([block_id])
        self._pool.release([self.block_ids[index]])
        self.block_ids[index] = block_id

    def truncate(self, num_tokens: int) -> None:
        """Give back the blocks that hold no position below `num_tokens`."""
        keep = blocks_for(num_tokens, self.block_size)
        self._pool.release(self.block_ids[keep:])
        del self.block_ids[keep:]

    def fork(self) -> "BlockTable":
        """A second table over the same blocks; whoever writes into a shared block first gets a copy."""
        child = BlockTable(self._pool, self.block_size)
        self._pool.share(self.block_ids)
        child.block_ids = list(self.block_ids)
        return child

    def release(self) -> None:
        """Give back every block."""
        self.truncate(0)

    def _held_range(self, start: int, end: int) -> range:
        first = start // self.block_size
        last = min(blocks_for(end, self.block_size), len(self.block_ids))
        return range(first, max(first, last))
