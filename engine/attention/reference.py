"""The naive backend: one row, one query head at a time, in float32. Slow, and obviously right: the oracle.

Every other backend is held against it. It can serve too (`--attention-backend reference`), for doubting a fast one.
"""

import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape, LayerAttention
from kvpool.quant import dequantize
from kvpool.storage import KVStorage


class ReferenceAttention:
    """softmax(scale * q k^T + mask) v, spelt out (Vaswani et al. 2017)."""

    name = "reference"

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        self._storage = storage
        self._shape = shape

    def plan(self, inputs: AttentionInputs) -> LayerAttention:
        """Nothing to prepare."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._storage.write(layer, inputs.slot_mapping, k, v)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for row in range(inputs.num_rows):
                queries = slice(int(inputs.query_starts[row]), int(inputs.query_starts[row + 1]))
                keys, values = self._context(layer, inputs, row)
                out[queries] = self._attend_row(layer, q[queries].float(), keys, values).to(q.dtype)
            return out

        return attend

    def _context(self, layer: int, inputs: AttentionInputs, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one row, both `[context, kv_head, head_dim]` float32."""
        length = int(inputs.context_lens[row])
        block_size = self._storage.layout.block_size
        tokens = [(int(inputs.block_tables[row, p // block_size]), p % block_size) for p in range(length)]
        blocks, offsets = (list(column) for column in zip(*tokens, strict=True))
        stored = self._storage.data[blocks, layer, :, offsets]
        scales = self._storage.scales
        numbers = stored.float() if scales is None else dequantize(stored, scales[blocks, layer, :, offsets])
        return numbers[:, 0], numbers[:, 1]

    def _attend_row(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[n, heads, head_dim]` queries at the last n positions -> the same shape."""
        heads_per_kv = self._shape.num_heads // self._storage.layout.num_kv_heads
        allowed = _visible(len(q), len(keys), self._shape.windows[layer], q.device)
        out = torch.empty_like(q)
        for head in range(self._shape.num_heads):
            kv_head = head // heads_per_kv
            scores = self._shape.scale * (q[:, head] @ keys[:, kv_head].T)
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
            out[:, head] = weights @ values[:, kv_head]
        return out


def _visible(num_queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """`[num_queries, length]`: which position may see which."""
    key = torch.arange(length, device=device)
    query = torch.arange(length - num_queries, length, device=device)[:, None]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
