"""What the prefix index has held lately: enough to say why a prompt missed, how old blocks are, and what is shared.

Remembers the tokens of the latest stored blocks, evicted ones included, within a bound; what it has forgotten counts as
never seen. Knows digests, namespaces and token ids; knows no block ids or requests, and decides nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvpool.prefix import NullPrefixListener, PrefixBlock

K = TypeVar("K")
V = TypeVar("V")

POOLS_REMEMBERED = 4
"""How many pools' worth of blocks: what the pool holds, and three times as much that it gave up. Of 16 tokens, a page
takes some 700 bytes: a thousandth of what a small model's block does."""

MAX_SHARED = 1024
MAX_RIVALS = 64
"""Blocks that a missed one is compared with: the latest that followed the same prefix."""


class MissReason(StrEnum):
    """Why no more of a prompt was found."""

    TOO_SHORT = "too_short"  # it does not fill a block, or what was known of it did not fill the next one
    SALT = "salt"  # its first block is known, under another salt
    ADAPTER = "adapter"  # its first block is known, under another adapter, model or template
    EVICTED = "evicted"  # the next block was known, and had to make room
    NEVER_SEEN = "never_seen"  # other tokens than anything known, from some position on
    NOT_ASKED = "not_asked"  # the request computes its whole prompt, or the cache is off


@dataclass(frozen=True, slots=True)
class Miss:
    """Where and why a prompt's match ended: at token `position`, the first that no known prefix had in its place."""

    reason: MissReason
    position: int


@dataclass(frozen=True, slots=True)
class PromptChain:
    """A prompt as the index sees it: where its chain starts, the digests of its full blocks, its tokens.

    `scope` is the namespace without the caller's salt: it tells a foreign salt from a foreign adapter.
    """

    root: bytes
    scope: bytes
    digests: Sequence[bytes]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that requests began with: its digest, its length in blocks, how many found it in the cache."""

    digest: bytes
    num_blocks: int
    num_hits: int


@dataclass(slots=True)
class _Page:
    parent: bytes
    token_ids: "array[int]"
    stored_s: float


class PrefixJournal(NullPrefixListener):
    """Listens to one index. `now` gives seconds since any origin; the latest `max_blocks` blocks are remembered."""

    def __init__(self, now: Callable[[], float], max_blocks: int) -> None:
        self._now = now
        self._max_blocks = max_blocks
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._followers: dict[bytes, dict[bytes, None]] = {}
        self._openings: dict[bytes, dict[tuple[bytes, bytes], bytes]] = {}
        self._shared: OrderedDict[bytes, SharedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def on_stored(self, block: PrefixBlock) -> None:
        """Remember a block's tokens; the block stored longest ago is forgotten."""
        self._forget(block.digest)
        parent = block.parent or block.root
        page = _Page(parent, array("i", block.token_ids), self._now())
        self._pages[block.digest] = page
        self._followers.setdefault(parent, {})[block.digest] = None
        if block.parent is None:
            self._openings.setdefault(page.token_ids.tobytes(), {})[block.root, block.scope] = block.digest
        if len(self._pages) > self._max_blocks:
            self._forget(next(iter(self._pages)))

    def found(self, chain: PromptChain, num_blocks: int) -> None:
        """A prompt was matched up to `num_blocks` blocks."""
        if not num_blocks:
            return
        digest = chain.digests[num_blocks - 1]
        known = self._shared.pop(digest, None)
        self._shared[digest] = SharedPrefix(digest, num_blocks, 1 + (known.num_hits if known else 0))
        if len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)

    def explain(self, chain: PromptChain, num_blocks: int, block_size: int) -> Miss | None:
        """Why a prompt matched up to `num_blocks` blocks and no further; None when every full block of it did."""
        position = num_blocks * block_size
        if not chain.digests:
            return Miss(MissReason.TOO_SHORT, 0)
        if num_blocks == len(chain.digests):
            return None
        if chain.digests[num_blocks] in self._pages:
            return Miss(MissReason.EVICTED, position)
        block = array("i", chain.token_ids[position : position + block_size])
        if num_blocks == 0 and (reason := self._foreign(chain, block)):
            return Miss(reason, 0)
        if num_blocks and not self._followers.get(chain.digests[num_blocks - 1]):
            return Miss(MissReason.TOO_SHORT, position)
        return Miss(MissReason.NEVER_SEEN, position + self._num_alike(chain, num_blocks, block))

    def most_shared(self, count: int) -> list[SharedPrefix]:
        """The prefixes that saved most tokens, most first."""
        return sorted(self._shared.values(), key=lambda p: p.num_hits * p.num_blocks, reverse=True)[:count]

    def ages_s(self, is_known: Callable[[bytes], bool]) -> list[float]:
        """Seconds since they were stored, of those blocks that `is_known` names, oldest first."""
        now = self._now()
        return [now - page.stored_s for digest, page in self._pages.items() if is_known(digest)]

    def _foreign(self, chain: PromptChain, block: "array[int]") -> MissReason | None:
        """Whether the prompt's first block is known in another namespace."""
        scopes = {scope for root, scope in self._openings.get(block.tobytes(), ()) if root != chain.root}
        if not scopes:
            return None
        return MissReason.SALT if chain.scope in scopes else MissReason.ADAPTER

    def _num_alike(self, chain: PromptChain, num_blocks: int, block: "array[int]") -> int:
        """Leading tokens of the missed block that some known block in its place had too."""
        parent = chain.digests[num_blocks - 1] if num_blocks else chain.root
        rivals = self._latest(self._followers.get(parent, {}))
        return max((_num_equal(block, self._pages[digest].token_ids) for digest in rivals), default=0)

    @staticmethod
    def _latest(followers: dict[bytes, None]) -> Iterator[bytes]:
        return (digest for digest, _ in zip(reversed(followers), range(MAX_RIVALS), strict=False))

    def _forget(self, digest: bytes) -> None:
        page = self._pages.pop(digest, None)
        if page is None:
            return
        _discard(self._followers, page.parent, digest)
        opening = page.token_ids.tobytes()
        for namespace, known in list(self._openings.get(opening, {}).items()):
            if known == digest:
                _discard(self._openings, opening, namespace)


def _discard(table: dict[bytes, dict[K, V]], key: bytes, inner: K) -> None:
    del table[key][inner]
    if not table[key]:
        del table[key]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
