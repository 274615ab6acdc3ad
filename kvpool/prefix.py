"""The prefix index: which block holds the KV of which token prefix.

Knows chained hashes and block ids; knows no requests or models. Each full block is named by a digest over its parent's
digest and its own token ids, so a digest names the whole prefix up to the block's end. The root of a chain is a digest
of the namespace: everything besides the tokens that makes two KV caches differ (model, tokenizer, chat template,
adapter, RoPE scaling, KV dtype, the caller's salt). SHA-256 at full length: equal digests mean equal prefixes.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvpool.pool import BlockPool


def namespace_root(*parts: str) -> bytes:
    """The digest a chain starts from; `parts` are length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256(b"quire-kv-v1")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of one full block of `token_ids` that follows the prefix named by `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_chain(root: bytes, digests: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append to `digests` those of all full blocks of `token_ids` that it does not cover yet."""
    for index in range(len(digests), len(token_ids) // block_size):
        parent = digests[index - 1] if index else root
        digests.append(chain(parent, token_ids[index * block_size : (index + 1) * block_size]))


class PrefixBlock(NamedTuple):
    """One full block of a prefix: its name, the name of the block before it (None for the first), its own tokens.

    `root` is where its chain starts, `scope` the namespace without the caller's salt; for who explains misses.
    """

    digest: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    root: bytes = b""
    scope: bytes = b""


class PrefixListener(Protocol):
    """Told of every change of an index, in order, children of a block before itself when they go."""

    def on_stored(self, block: PrefixBlock) -> None:
        """A block can be found from now on."""

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        """The pool is about to reuse a block for something else: its content is still there. `on_removed` follows."""

    def on_removed(self, digest: bytes) -> None:
        """A block cannot be found any more."""

    def on_cleared(self) -> None:
        """No block can be found any more."""

    def close(self) -> None:
        """Nothing will happen any more."""


class NullPrefixListener:
    """Listens to nothing."""

    def on_stored(self, block: PrefixBlock) -> None:
        """Ignore."""

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        """Ignore."""

    def on_removed(self, digest: bytes) -> None:
        """Ignore."""

    def on_cleared(self) -> None:
        """Ignore."""

    def close(self) -> None:
        """Nothing to do."""


class PrefixListeners:
    """Several listeners as one, told in the order given."""

    def __init__(self, *listeners: PrefixListener) -> None:
        self._listeners = listeners

    def on_stored(self, block: PrefixBlock) -> None:
        """Tell all."""
        for listener in self._listeners:
            listener.on_stored(block)

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        """Tell all."""
        for listener in self._listeners:
            listener.on_evicted(digest, block_id)

    def on_removed(self, digest: bytes) -> None:
        """Tell all."""
        for listener in self._listeners:
            listener.on_removed(digest)

    def on_cleared(self) -> None:
        """Tell all."""
        for listener in self._listeners:
            listener.on_cleared()

    def close(self) -> None:
        """Close all."""
        for listener in self._listeners:
            listener.close()


class PrefixIndex:
    """Digest -> block, over one pool: a forest. One block per digest, and no block without the one before it."""

    def __init__(self, pool: BlockPool, listener: PrefixListener | None = None) -> None:
        self._pool = pool
        self._listener = listener or NullPrefixListener()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._parent_of: dict[bytes, bytes | None] = {}
        self._children_of: dict[bytes, set[bytes]] = {}
        pool.set_evict_listener(self._evicted)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_of

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `digests`. References are not taken: `pool.share` them at once."""
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, block: PrefixBlock, block_id: int) -> int | None:
        """Make a full, finished, referenced block findable.

        Gives the block that holds this prefix: `block_id`, or one published before, which the caller had better use
        instead of its own. None when the block before it is not known (any more): nobody could ever find this one.
        """
        known = self._block_of.get(block.digest)
        if known is not None:
            return known
        assert block_id not in self._digest_of, f"block {block_id} is published under another prefix"
        assert self._pool.ref_count(block_id) > 0, f"block {block_id} is published by nobody"
        if block.parent is not None:
            if block.parent not in self._block_of:
                return None
            self._children_of.setdefault(block.parent, set()).add(block.digest)
        self._parent_of[block.digest] = block.parent
        self._block_of[block.digest] = block_id
        self._digest_of[block_id] = block.digest
        self._pool.set_findable(block_id, True)
        self._listener.on_stored(block)
        return block_id

    def forget(self, block_id: int) -> None:
        """Make a block unfindable (its content is about to change), and with it all that follow it."""
        digest = self._digest_of.get(block_id)
        if digest is not None:
            self._forget_tree(digest)

    def clear(self) -> None:
        """Forget every block."""
        for digest in list(self._block_of):
            self._pool.set_findable(self._remove(digest), False)
        self._listener.on_cleared()

    def check(self) -> None:
        """Assert that index and pool agree, and that every block follows a known one; for tests."""
        assert len(self._block_of) == len(self._digest_of), "digests and blocks are not one to one"
        assert self._parent_of.keys() == self._block_of.keys(), "parents are kept for other blocks than those known"
        for digest, block_id in self._block_of.items():
            assert self._digest_of[block_id] == digest, f"block {block_id} is known under two digests"
            parent = self._parent_of[digest]
            assert parent is None or digest in self._children_of[parent], f"block {block_id} has lost its parent"
        num_children = sum(len(children) for children in self._children_of.values())
        assert num_children == sum(parent is not None for parent in self._parent_of.values()), "children are miscounted"
        for block_id in range(self._pool.num_blocks):
            assert self._pool.is_findable(block_id) == (block_id in self._digest_of), f"block {block_id} is lost"

    def _evicted(self, block_id: int) -> None:
        """The pool reuses a block. It has children only where somebody held them without holding it: they go too."""
        digest = self._digest_of[block_id]
        for child in list(self._children_of.get(digest, ())):
            self._forget_tree(child)
        self._listener.on_evicted(digest, block_id)
        self._remove(digest)
        self._listener.on_removed(digest)

    def _forget_tree(self, digest: bytes) -> None:
        subtree = [digest]
        for parent in subtree:  # grows while it is walked
            subtree.extend(self._children_of.get(parent, ()))
        for descendant in reversed(subtree):
            self._pool.set_findable(self._remove(descendant), False)
            self._listener.on_removed(descendant)

    def _remove(self, digest: bytes) -> int:
        """Take a digest out of all tables; gives its block."""
        block_id = self._block_of.pop(digest)
        del self._digest_of[block_id]
        parent = self._parent_of.pop(digest)
        if parent is not None:
            siblings = self._children_of[parent]
            siblings.discard(digest)
            if not siblings:
                del self._children_of[parent]
        return block_id
