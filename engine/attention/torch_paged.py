"""The portable backend: gathers pages into dense scratch and calls torch's fused attention. Runs wherever torch does.

The query heads of one kv head are folded into the query dimension, so keys and values are gathered once and never
repeated, and the same call serves every kind of row:

    decode rows    B rows, 1 query   q [B, kv_heads, group, head_dim]         rows of similar length together
    a chunk        1 row,  n queries q [1, kv_heads, n * group, head_dim]     in tiles of queries

(On an AVX2 machine `scaled_dot_product_attention` told of grouped heads instead took 7 to 22 times as long for bfloat16
decode rows, and given strided keys 1.2 to 2.7 times; in float32 all three were near each other.) Memory of a layer is
bounded: the gather by `MAX_GATHERED_TOKENS` or one row's context, whichever is more; masks and scores by
`MAX_TILE_SCORES`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.gather import Gatherer, gatherer_for
from engine.attention.interface import AttentionInputs, AttentionShape, IntArray, LayerAttention
from kvpool.storage import KVStorage

MAX_GATHERED_TOKENS = 32_768
"""Tokens, padding included, that decode rows gathered together may span."""

MAX_TILE_SCORES = 1 << 20
"""Scores of one kv head in a tile of a chunk."""

MAX_TILE_QUERIES = 128
"""Queries of a tile. Each tile reads only the keys up to its last query, so small tiles skip most of what a causal mask
would throw away."""

FREE_PADDING = 512
"""Padding tokens that cost less than starting another group of decode rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Queries attended in one call, over keys `first_key : end_key` of what was gathered.

    `query_positions` `[B, m]` and `key_positions` `[B, keys]` meet in the mask, m being 1 (for all folded heads) or all
    folded queries; both are None when every query sees every key.
    """

    queries: slice
    first_key: int
    end_key: int
    query_positions: Tensor | None
    key_positions: Tensor | None

    def mask(self, window: int | None) -> Tensor | None:
        """`[B, 1, m, keys]` bool, True where a query sees a key. Made per layer: keeping it would cost more."""
        if self.query_positions is None or self.key_positions is None:
            return None
        query, key = self.query_positions[:, None, :, None], self.key_positions[:, None, None, :]
        return key <= query if window is None else (key <= query) & (key > query - window)


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """Rows whose context is fetched together, from the `places` that the pool's gatherer wants."""

    num_rows: int
    places: Tensor
    tiles: tuple[_Tile, ...]


class TorchPagedAttention:
    """Paged attention in torch operators: any device, dtype and block size."""

    name = "torch"

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        self._storage = storage
        self._shape = shape
        self._gatherer = gatherer_for(storage)
        self._group = shape.num_heads // storage.layout.num_kv_heads

    def plan(self, inputs: AttentionInputs) -> LayerAttention:
        """Index arithmetic for the step, once for each distinct window."""
        planner = _Planner(inputs, self._storage, self._gatherer, self._group)
        token_rows = self._storage.rows_of(inputs.slot_mapping)
        plans = {window: planner.gathers(window) for window in set(self._shape.windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._storage.write_rows(layer, token_rows, k, v)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            window = self._shape.windows[layer]
            for gather in plans[window]:
                keys, values = self._gatherer.fetch(layer, gather.places, gather.num_rows, q.dtype)
                for tile in gather.tiles:
                    seen = slice(tile.first_key, tile.end_key)
                    mask = tile.mask(window)
                    out[tile.queries] = self._attend(q[tile.queries], keys[:, :, seen], values[:, :, seen], mask)
            return out

        return attend

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """`[B * n, heads, head_dim]` queries of B rows, n each -> the same shape."""
        num_rows, num_kv_heads, _, head_dim = keys.shape
        folded = q.reshape(num_rows, -1, num_kv_heads, self._group, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            folded.reshape(num_rows, num_kv_heads, -1, head_dim), keys, values, attn_mask=mask, scale=self._shape.scale
        )
        return out.view(folded.shape).transpose(1, 2).reshape(q.shape)


class _Planner:
    """Turns one step's lengths and block tables into gathers."""

    def __init__(self, inputs: AttentionInputs, storage: KVStorage, gatherer: Gatherer, group: int) -> None:
        self._inputs = inputs
        self._storage = storage
        self._gatherer = gatherer
        self._group = group
        self._device = inputs.block_tables.device

    def gathers(self, window: int | None) -> list[_Gather]:
        """All rows of the step: decode rows in groups, then chunks one by one."""
        groups = [self._decode_group(rows, window) for rows in self._decode_slices(window)]
        num_rows = self._inputs.num_rows
        return groups + [self._chunk(row, window) for row in range(self._inputs.num_decode_rows, num_rows)]

    def _decode_slices(self, window: int | None) -> Iterator[slice]:
        """Runs of decode rows: as long as padding to the longest stays cheap and the scratch bounded."""
        lengths = self._inputs.context_lens[: self._inputs.num_decode_rows]
        spans: list[int] = (lengths if window is None else np.minimum(lengths, window)).tolist()
        start, longest, total = 0, 0, 0
        for row, span in enumerate(spans):
            padded = max(longest, span) * (row - start + 1)
            wasteful = padded - (total + span) > FREE_PADDING + (total + span) // 4
            if row > start and (padded > MAX_GATHERED_TOKENS or wasteful):
                yield slice(start, row)
                start, longest, total = row, 0, 0
            longest, total = max(longest, span), total + span
        if spans:
            yield slice(start, len(spans))

    def _decode_group(self, rows: slice, window: int | None) -> _Gather:
        lengths = self._inputs.context_lens[rows]
        firsts = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        num_keys = int((lengths - firsts).max())
        positions, places = self._locate(rows, firsts, num_keys)
        same_span = bool((lengths - firsts == num_keys).all())
        last = None if same_span else torch.from_numpy(lengths - 1).to(self._device)[:, None]
        tile = _Tile(rows, 0, num_keys, last, None if same_span else positions)
        return _Gather(len(lengths), places, (tile,))

    def _chunk(self, row: int, window: int | None) -> _Gather:
        """One row of several queries; tiles of queries over one gathered context."""
        inputs = self._inputs
        length = int(inputs.context_lens[row])
        query_start, query_end = (int(inputs.query_starts[i]) for i in (row, row + 1))
        start = length - (query_end - query_start)
        first = 0 if window is None else max(0, start - window + 1)
        positions, places = self._locate(slice(row, row + 1), np.array([first]), length - first)
        max_queries = max(1, min(MAX_TILE_QUERIES, MAX_TILE_SCORES // (self._group * (length - first))))
        tiles = []
        for low in range(start, length, max_queries):
            high = min(low + max_queries, length)
            seen = slice(0 if window is None else max(0, low - window + 1 - first), high - first)
            asking = torch.arange(low, high, device=self._device).repeat_interleave(self._group)[None]
            queries = slice(query_start + low - start, query_start + high - start)
            tiles.append(_Tile(queries, seen.start, seen.stop, asking, positions[:, seen]))
        return _Gather(1, places, tuple(tiles))

    def _locate(self, rows: slice, firsts: IntArray, num_keys: int) -> tuple[Tensor, Tensor]:
        """Positions `[B, keys]` from each row's first one on, and where their layer-0 keys lie.

        Past a row's end the last token is fetched again: it is masked, but it is the row's own, so that nothing another
        sequence left in the pool (an infinity times a zero weight) can reach this row.
        """
        inputs = self._inputs
        lengths = torch.from_numpy(inputs.context_lens[rows]).to(self._device)
        positions = torch.from_numpy(firsts).to(self._device)[:, None] + torch.arange(num_keys, device=self._device)
        held = torch.minimum(positions, lengths[:, None] - 1)
        block_size = self._storage.layout.block_size
        blocks = inputs.block_tables[rows].gather(1, held // block_size)
        token_rows = self._storage.rows_of(blocks * block_size + held % block_size)
        return positions, self._gatherer.places(token_rows)
