"""An optional backend: paged attention by the flash-attn package (Dao 2023), version 2.6 and later, where installed.

    decode rows    flash_attn_with_kvcache     q [B, 1, heads, head_dim], its keys split over the device
    chunks         flash_attn_varlen_func      q [T, heads, head_dim], ragged

Both read keys and values through a block table, from views of one layer by the views' own strides: nothing is copied.
Its kernels want blocks of a multiple of 256 tokens. A head size that is no multiple of 8 they would serve by padding a
copy of the whole pool, so it is refused. Decode steps are not recorded: they are planned from lengths on the host.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape, IntArray, LayerAttention
from engine.attention.optional import Demands, load_library
from kvpool.storage import KVStorage

DEMANDS = Demands(
    name="flash-attn",
    head_dims=range(8, 257, 8),
    head_dims_in_words="head sizes of multiples of 8 up to 256",
    block_multiple=256,
    capability=(8, 0),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The rows of several queries: `[rows + 1]` int32 sums of their queries and contexts, and the longest of each."""

    query_sums: Tensor
    context_sums: Tensor
    max_queries: int
    max_context: int


class FlashAttnAttention:
    """Paged attention for float16 and bfloat16 pools on GPUs from Ampere on.

    Raises (at construction):
        ValueError: flash-attn is not installed or too old, or cannot read this pool.
    """

    name = DEMANDS.name

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        DEMANDS.check(storage)
        self._library: Any = load_library("flash_attn")
        if "block_table" not in inspect.signature(self._library.flash_attn_varlen_func).parameters:
            raise ValueError("this flash-attn cannot read a paged KV cache in prefill: it needs version 2.6 or later")
        self._storage = storage
        self._shape = shape

    def plan(self, inputs: AttentionInputs) -> LayerAttention:
        """Lengths, their sums and the block tables as int32 on the device, once for all layers."""
        storage, num_decode = self._storage, inputs.num_decode_rows
        token_rows = storage.rows_of(inputs.slot_mapping)
        tables = inputs.block_tables.to(torch.int32)
        lengths, chunks = self._describe(inputs)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            storage.write_rows(layer, token_rows, k, v)
            pool = (storage.keys(layer), storage.values(layer))
            options = self._options(layer)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            if num_decode:
                out[:num_decode] = self._library.flash_attn_with_kvcache(
                    q[:num_decode, None], *pool, cache_seqlens=lengths, block_table=tables[:num_decode], **options
                )[:, 0]
            if chunks is not None:
                sizes = (chunks.query_sums, chunks.context_sums, chunks.max_queries, chunks.max_context)
                out[num_decode:] = self._library.flash_attn_varlen_func(
                    q[num_decode:], *pool, *sizes, block_table=tables[num_decode:], **options
                )
            return out

        return attend

    def _options(self, layer: int) -> dict[str, Any]:
        """A window of w tokens is, as flash-attn counts, the w - 1 before a query's own and none after it."""
        window = self._shape.windows[layer]
        sides = (-1, -1) if window is None else (window - 1, 0)
        return {"softmax_scale": self._shape.scale, "causal": True, "window_size": sides}

    def _describe(self, inputs: AttentionInputs) -> tuple[Tensor, _Chunks | None]:
        """Contexts of the decode rows `[B]`, and the chunks if there are any; all sent in one piece."""
        num_decode = inputs.num_decode_rows
        query_starts = inputs.query_starts[num_decode:] - num_decode
        contexts = inputs.context_lens[num_decode:]
        parts = [inputs.context_lens[:num_decode], query_starts, _sums(contexts)]
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(self._storage.device, non_blocking=True)
        lengths, query_sums, context_sums = torch.split(packed, [len(part) for part in parts])
        if not len(contexts):
            return lengths, None
        return lengths, _Chunks(query_sums, context_sums, int(np.diff(query_starts).max()), int(contexts.max()))


def _sums(counts: IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts)))
