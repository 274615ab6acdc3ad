"""The prefix index: which block holds the KV of which token prefix.

Knows chained hashes and block ids; knows no requests or models. Each full block is named by a digest over its parent's
digest and its own token ids, so a digest names the whole prefix up to the block's end. The root of a chain is a digest
of the namespace: everything besides the tokens that makes two KV caches differ (model, tokenizer, chat template,
adapter, RoPE scaling, KV dtype, the caller's salt). SHA-256 at full length: equal digests mean equal prefixes.
"""

import hashlib
from array import array
from collections.abc import Sequence

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


class PrefixIndex:
    """Digest -> block, over one pool. One block per digest; evicted blocks are forgotten at once."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.set_evict_listener(self._evicted)

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `digests`. References are not taken: `pool.share` them at once."""
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, digest: bytes, block_id: int) -> bool:
        """Make a full, finished, referenced block findable. False when another block already holds this prefix."""
        if digest in self._block_of:
            return self._block_of[digest] == block_id
        assert block_id not in self._digest_of, f"block {block_id} is published under another prefix"
        assert self._pool.ref_count(block_id) > 0, f"block {block_id} is published by nobody"
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        self._pool.set_findable(block_id, True)
        return True

    def forget(self, block_id: int) -> None:
        """Make a block unfindable (its content is about to change). Does nothing when it is not known."""
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]
            self._pool.set_findable(block_id, False)

    def clear(self) -> None:
        """Forget every block."""
        for block_id in list(self._digest_of):
            self.forget(block_id)

    def check(self) -> None:
        """Assert that index and pool agree; for tests."""
        assert len(self._block_of) == len(self._digest_of), "digests and blocks are not one to one"
        for digest, block_id in self._block_of.items():
            assert self._digest_of[block_id] == digest, f"block {block_id} is known under two digests"
        for block_id in range(self._pool.num_blocks):
            assert self._pool.is_findable(block_id) == (block_id in self._digest_of), f"block {block_id} is lost"

    def _evicted(self, block_id: int) -> None:
        del self._block_of[self._digest_of.pop(block_id)]
