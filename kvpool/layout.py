"""Bytes and shapes of a KV block: pure arithmetic, no tensors.

bytes per token = 2 x layers x kv_heads x head_dim x bytes per element        (K and V)
bytes per block = block_size x bytes per token
a block         = [layer, 2, block_size, kv_head, head_dim], contiguous, so offload is one copy
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one sequence's KV cache; `element_bytes` is 4, 2 or 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token costs over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        return self.block_size * self.bytes_per_token

    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[layer, 2, block_size, kv_head, head_dim]`."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    def num_blocks_in(self, budget_bytes: int) -> int:
        """How many whole blocks fit `budget_bytes`."""
        return max(0, budget_bytes // self.bytes_per_block)
