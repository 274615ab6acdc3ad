"""Bytes and shapes of a KV block: pure arithmetic, no tensors.

bytes per head  = head_dim x bytes per element + bytes of its scale      (a scale only where the cache is quantized)
bytes per token = 2 x layers x kv_heads x bytes per head                 (K and V)
bytes per block = block_size x bytes per token
a block         = [layer, 2, block_size, kv_head, head_dim], contiguous, so offload is one copy
"""

from dataclasses import dataclass

KV_CACHE_DTYPES = ("auto", "fp8", "int8")
"""What keys and values may be stored as; `auto` is the model's own number type."""

SCALE_BYTES = 2
"""A float16 scale for each head of each token. It rules over 64 or 128 one-byte elements, so at half a wider type's
size that leaves 128/66 = 1.94 or 256/130 = 1.97 times the tokens; a float32 scale would leave 1.88 at 64."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one sequence's KV cache.

    Attributes:
        element_bytes: 4, 2 or 1.
        scale_bytes: of the scale beside each head of each key and value; 0 where elements stand for themselves.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.scale_bytes < 0:
            raise ValueError(f"scale_bytes must be at least 0, got {self.scale_bytes}")

    @property
    def is_quantized(self) -> bool:
        """Whether elements are multiples of a scale beside them."""
        return self.scale_bytes > 0

    @property
    def cell_bytes(self) -> int:
        """Bytes of one key (or value): all heads of one token in one layer, scales included."""
        return self.num_kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token costs over all layers."""
        return 2 * self.num_layers * self.cell_bytes

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


def element_and_scale_bytes(kv_cache_dtype: str, model_element_bytes: int) -> tuple[int, int]:
    """`KVLayout`'s two sizes for one of `KV_CACHE_DTYPES` under a model that computes in `model_element_bytes`."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    return (model_element_bytes, 0) if kv_cache_dtype == "auto" else (1, SCALE_BYTES)
