"""How many tokens, contexts and users fit a memory: the arithmetic behind `quire plan`. Whole numbers, no tensors.

    tokens = (memory - weights - reserve) / KV bytes per token
    blocks = tokens / block_size, rounded down: what the pool hands out
    users  = blocks / (blocks of one context), rounded down

Knows bytes; knows no models or devices.
"""

from dataclasses import dataclass

from kvpool.layout import KVLayout
from kvpool.table import blocks_for


@dataclass(frozen=True, slots=True)
class Capacity:
    """A memory and what lives in it, in bytes; `reserve_bytes` stays free for activations, the driver and the rest."""

    memory_bytes: int
    weight_bytes: int
    reserve_bytes: int
    layout: KVLayout

    @property
    def kv_budget_bytes(self) -> int:
        """What is left for KV; negative when the weights alone are too large."""
        return self.memory_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits."""
        return max(0, self.kv_budget_bytes // self.layout.bytes_per_token)

    @property
    def num_blocks(self) -> int:
        """Whole blocks that fit."""
        return self.layout.num_blocks_in(self.kv_budget_bytes)

    def num_users(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once, none sharing a block."""
        return self.num_blocks // blocks_for(context, self.layout.block_size)

    def longest_context(self, num_users: int) -> int:
        """Tokens that each of `num_users` sequences may have."""
        return self.num_blocks // num_users * self.layout.block_size

    def memory_for(self, context: int, num_users: int) -> int:
        """Bytes of memory that `num_users` sequences of `context` tokens would need, weights and reserve included."""
        num_blocks = num_users * blocks_for(context, self.layout.block_size)
        return self.weight_bytes + self.reserve_bytes + num_blocks * self.layout.bytes_per_block
