"""The tensors behind the KV pool: one allocation, every layer of a block side by side.

    [block, layer, 2, block_size, cell]         2: keys, values; a cell is one token's heads

          block 0                                   block 1
    +-----+-----+-----+-----+-- ... --+-----+-----+-----+ ...
    | K l0| V l0| K l1| V l1|         | K ln| V ln| K l0|       each [block_size, cell]
    +-----+-----+-----+-----+-- ... --+-----+-----+-----+ ...

    cell            [kv_head, head_dim] elements                            as the model computes them
    quantized cell  [kv_head, head_dim] codes, then [kv_head] scales        bytes; see `kvpool.quant`

Scales lie behind their codes, inside the block: whoever moves a block, here or to another memory, moves one piece.

Knows block ids, positions and bytes; knows nothing of sequences, models or who may write where (the pool says that).

A token is addressed twice. Its *slot* is `block * block_size + offset`, as block tables tell it. Its *row* is where its
layer-0 key lies when the pool is read as rows of one cell; the key of layer `l` is then `l * layer_stride` rows on, its
value `block_size` rows further. Rows turn every access into one flat index.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from kvpool.layout import KVLayout
from kvpool.quant import LARGEST_CODE, SCALE_DTYPE, dequantize, quantize
from kvpool.table import BlockCopy


class KVStorage:
    """Keys and values of `num_blocks` blocks on one device. Allocated once, never resized.

    Not cleared: nobody reads a position before writing it, and a CPU's pool takes real pages only as it fills.

    Attributes, all views of the one allocation:
        blocks: `[block, ...]`, a block's whole memory as one contiguous row: elements, or bytes where quantized.
        data: `[block, layer, 2, block_size, kv_head, head_dim]` elements; codes where quantized, strided then.
        scales: `[block, layer, 2, block_size, kv_head]` float16, strided; None unless quantized.
        token_rows: `[row, cell]`, elements or bytes: see `rows_of`.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate; `dtype` is of one element: the model's, or for a quantized layout one of `quant.LARGEST_CODE`."""
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes, the layout says {layout.element_bytes}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.layer_stride = 2 * layout.block_size
        if layout.is_quantized:
            cells = _quantized_cells(layout, num_blocks, dtype, device)
            num_code_bytes = layout.num_kv_heads * layout.head_dim
            codes = cells[..., :num_code_bytes].view(dtype)
            self.data = codes.view(*codes.shape[:-1], layout.num_kv_heads, layout.head_dim)
            self.scales: Tensor | None = cells[..., num_code_bytes:].view(SCALE_DTYPE)
        else:
            self.data = torch.empty((num_blocks, *layout.block_shape()), dtype=dtype, device=device)
            self.scales = None
            cells = self.data.flatten(-2)
        self.blocks = cells.view(num_blocks, -1)
        self.token_rows = cells.view(-1, cells.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of one stored element: the model's, or that of codes."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.data.device

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocation: `num_blocks * layout.bytes_per_block`, exactly."""
        return self.data.untyped_storage().nbytes()

    def keys(self, layer: int) -> Tensor:
        """A view of one layer's keys (or their codes), `[block, block_size, kv_head, head_dim]`, strided."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """A view of one layer's values (or their codes), `[block, block_size, kv_head, head_dim]`, strided."""
        return self.data[:, layer, 1]

    def rows_of(self, slots: Tensor) -> Tensor:
        """Rows of the layer-0 keys of token slots: any shape of integers -> the same shape of int64.

        Done once per step: the same rows serve every layer.
        """
        slots = slots.long()
        offsets = slots % self.layout.block_size
        return (slots - offsets) * (2 * self.layout.num_layers) + offsets

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values, both `[T, kv_head, head_dim]`, at the token slots `[T]` of one layer."""
        self.write_rows(layer, self.rows_of(slot_mapping), k, v)

    def write_rows(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """The same at rows that `rows_of` made. What the pool holds in fewer bits is rounded here, once."""
        key_rows = rows + layer * self.layer_stride
        if self.scales is None:
            self.token_rows.index_copy_(0, key_rows, k.flatten(1).to(self.dtype))
            self.token_rows.index_copy_(0, key_rows + self.layout.block_size, v.flatten(1).to(self.dtype))
        else:
            both = torch.cat((key_rows, key_rows + self.layout.block_size))
            codes, scales = quantize(torch.cat((k, v)), self.dtype)
            cells = torch.cat((codes.flatten(1).view(torch.uint8), scales.view(torch.uint8)), dim=1)
            self.token_rows.index_copy_(0, both, cells)

    def read_rows(self, rows: Tensor) -> Tensor:
        """What lies in rows `[N]` of the pool, as numbers: `[N, kv_head, head_dim]`; float32 where quantized."""
        shape = (len(rows), self.layout.num_kv_heads, self.layout.head_dim)
        cells = self.token_rows.index_select(0, rows)
        if self.scales is None:
            return cells.view(shape)
        num_codes = shape[1] * shape[2]
        return dequantize(cells[:, :num_codes].view(self.dtype).view(shape), cells[:, num_codes:].view(SCALE_DTYPE))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all layers, as if one after the other in the order given.

        Runs of copies that do not touch each other's targets go out together: inside a run nobody reads or writes a
        block that an earlier copy of the run wrote, so one gather and one scatter do the same.
        """
        for run in _independent_runs(copies):
            sources = torch.tensor([copy.source_id for copy in run], device=self.device)
            targets = torch.tensor([copy.target_id for copy in run], device=self.device)
            self.blocks[targets] = self.blocks[sources]


def _quantized_cells(layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[block, layer, 2, block_size, cell]` bytes: codes of all heads, then their scales.

    Raises:
        ValueError: codes of another kind, scales of another size, or an odd number of codes, which float16 scales
            could not follow.
    """
    if dtype not in LARGEST_CODE:
        raise ValueError(f"no quantized KV cache of {dtype}")
    if layout.scale_bytes != SCALE_DTYPE.itemsize:
        raise ValueError(f"scales of {SCALE_DTYPE} have {SCALE_DTYPE.itemsize} bytes, not {layout.scale_bytes}")
    if layout.num_kv_heads * layout.head_dim % SCALE_DTYPE.itemsize:
        raise ValueError(
            f"a quantized KV cache needs an even number of elements, got {layout.num_kv_heads} x {layout.head_dim}"
        )
    return torch.empty((num_blocks, *layout.block_shape()[:3], layout.cell_bytes), dtype=torch.uint8, device=device)


def _independent_runs(copies: Sequence[BlockCopy], max_run: int = 64) -> Iterator[list[BlockCopy]]:
    """Split copies, in order, where one reads or writes a target of its run, and every `max_run` (bounds memory)."""
    start = 0
    while start < len(copies):
        run: list[BlockCopy] = []
        written: set[int] = set()
        for copy in islice(copies, start, start + max_run):
            if copy.source_id in written or copy.target_id in written:
                break
            run.append(copy)
            written.add(copy.target_id)
        start += len(run)
        yield run
