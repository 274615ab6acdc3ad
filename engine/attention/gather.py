"""Pages of the pool into dense keys and values that torch's fused attention takes, quantized pools included.

Knows the pool's rows and one layer at a time; knows nothing of masks, queries or which rows belong together.
"""

from typing import Protocol

import torch
from torch import Tensor

from kvpool.quant import SCALE_DTYPE
from kvpool.storage import KVStorage


class Gatherer(Protocol):
    """Fetches the context of rows of a step, in two parts: where it lies is worked out once for all layers."""

    def places(self, token_rows: Tensor) -> Tensor:
        """What `fetch` wants for pool rows `[B, keys]` of layer-0 keys."""

    def fetch(self, layer: int, places: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, kv_heads, keys, head_dim]` in `dtype`, in scratch that the next call overwrites."""


def gatherer_for(storage: KVStorage) -> Gatherer:
    """The one that reads this pool."""
    return PlainGatherer(storage) if storage.scales is None else DequantizingGatherer(storage)


class PlainGatherer:
    """Elements stand for themselves: one flat gather of heads puts each where attention wants it."""

    def __init__(self, storage: KVStorage) -> None:
        layout = storage.layout
        self._num_kv_heads = layout.num_kv_heads
        self._layer_stride = storage.layer_stride * layout.num_kv_heads
        self._value_offset = layout.block_size * layout.num_kv_heads
        self._head_rows = storage.data.view(-1, layout.head_dim)
        self._heads = torch.arange(layout.num_kv_heads, device=storage.device)
        self._scratch = [self._head_rows.new_empty((0, layout.head_dim)) for _ in ("keys", "values")]

    def places(self, token_rows: Tensor) -> Tensor:
        """Rows of single heads, `[B * kv_heads * keys]`."""
        return (token_rows[:, None, :] * self._num_kv_heads + self._heads[:, None]).flatten()

    def fetch(self, layer: int, places: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Gatherer` says; in scratch only where `dtype` is the pool's own."""
        if len(places) > len(self._scratch[0]):
            self._scratch = [old.new_empty((len(places), old.shape[1])) for old in self._scratch]
        key_rows = places + layer * self._layer_stride
        keys, values = (
            torch.index_select(self._head_rows, 0, rows, out=scratch[: len(places)])
            for rows, scratch in zip((key_rows, key_rows + self._value_offset), self._scratch, strict=True)
        )
        shape = (num_rows, self._num_kv_heads, -1, self._head_rows.shape[1])
        return keys.view(shape).to(dtype), values.view(shape).to(dtype)


class DequantizingGatherer:
    """Codes and scales: whole cells are gathered as bytes, and multiplied out on the way to where heads belong."""

    def __init__(self, storage: KVStorage) -> None:
        layout = storage.layout
        self._storage = storage
        self._num_codes = layout.num_kv_heads * layout.head_dim
        self._cells = storage.token_rows.new_empty((0, layout.cell_bytes))
        self._scratch = [torch.empty(0, device=storage.device) for _ in ("keys", "values")]

    def places(self, token_rows: Tensor) -> Tensor:
        """The rows themselves, `[B * keys]`."""
        return token_rows.flatten()

    def fetch(self, layer: int, places: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Gatherer` says."""
        num_elements = len(places) * self._num_codes
        if num_elements > self._scratch[0].numel() or dtype != self._scratch[0].dtype:
            self._cells = self._cells.new_empty((len(places), self._cells.shape[1]))
            self._scratch = [old.new_empty(num_elements, dtype=dtype) for old in self._scratch]
        key_rows = places + layer * self._storage.layer_stride
        return (
            self._dequantized(key_rows, num_rows, self._scratch[0][:num_elements]),
            self._dequantized(key_rows + self._storage.layout.block_size, num_rows, self._scratch[1][:num_elements]),
        )

    def _dequantized(self, rows: Tensor, num_rows: int, out: Tensor) -> Tensor:
        """Rows of one kind, `[B * keys]` -> `[B, kv_heads, keys, head_dim]` in `out`."""
        layout = self._storage.layout
        cells = torch.index_select(self._storage.token_rows, 0, rows, out=self._cells[: len(rows)])
        codes, scales = cells[:, : self._num_codes].view(self._storage.dtype), cells[:, self._num_codes :]
        heads = codes.view(num_rows, -1, layout.num_kv_heads, layout.head_dim).transpose(1, 2)
        factors = scales.view(SCALE_DTYPE).view(num_rows, -1, layout.num_kv_heads, 1).transpose(1, 2)
        # Copied first, in one pass that converts and reorders: a product of unlike types goes through a third tensor.
        return out.view(heads.shape).copy_(heads).mul_(factors)
