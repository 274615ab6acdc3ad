"""Which cached block goes when the pool needs one: a small protocol, and the plain answer to it.

Knows block ids and moments of use; knows no digests. A policy is told when a block loses its last reference (`add`) and
when it is no longer evictable (`remove`); the pool asks it for the next one to go (`pop`).

Children go before their parents, or they would stay behind, unreachable. Least-recently-used order gives exactly that,
because of two facts that the pool's users keep: whoever holds a block of the prefix tree holds its ancestors too, and
a table is released from its tail. So a parent's last use is never before that of its child.
"""

from collections import OrderedDict
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps the cached blocks of one pool, in the order in which they should go."""

    def __len__(self) -> int:
        """Blocks that `pop` could give."""

    def __contains__(self, block_id: int) -> bool:
        """Whether `pop` could give this block."""

    @property
    def num_kept(self) -> int:
        """How many of them should survive pressure: taken only where nothing else is left to take."""

    def add(self, block_id: int) -> None:
        """Its last reference was dropped just now, and it can be found."""

    def remove(self, block_id: int) -> None:
        """It is referred to again, or cannot be found any more."""

    def forget(self, block_id: int) -> None:
        """Its content cannot be found any more, whether or not it is referred to."""

    def pop(self) -> int:
        """Take out the block that goes next. There is one."""


class LeastRecentlyUsed:
    """The block whose last reference was dropped longest ago goes first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    @property
    def num_kept(self) -> int:
        """None: all are equal."""
        return 0

    def add(self, block_id: int) -> None:
        """Put it last."""
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take it out."""
        del self._blocks[block_id]

    def forget(self, block_id: int) -> None:
        """Nothing is remembered beside the order."""

    def pop(self) -> int:
        """Take out the first."""
        return self._blocks.popitem(last=False)[0]
