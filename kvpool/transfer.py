"""Whole blocks out of the pool's tensors and back into them, as bytes: for tiers behind the pool.

Knows storage and bytes; knows no digests and no files. A block is one contiguous piece (see `kvpool.storage`), scales
included, so its bytes are taken as they lie: right for every number type, and of use only to an equal layout.
"""

from collections.abc import Sequence

import torch

from kvpool.storage import KVStorage


def export_blocks(storage: KVStorage, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """The bytes of each block, `layout.bytes_per_block` long; one gather and one copy to the host for all of them."""
    if not block_ids:
        return ()
    rows = storage.blocks.view(torch.uint8)[torch.tensor(block_ids, device=storage.device)].cpu()
    return tuple(row.numpy().tobytes() for row in rows)


def load_blocks(storage: KVStorage, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
    """Fill blocks with what `export_blocks` gave for blocks of an equal layout.

    Raises:
        ValueError: a piece of another size; nothing was written.
    """
    size = storage.layout.bytes_per_block
    if any(len(piece) != size for piece in data):
        raise ValueError(f"blocks of {size} bytes cannot be filled with {sorted({len(piece) for piece in data})} bytes")
    rows = storage.blocks.view(torch.uint8)
    for block_id, piece in zip(block_ids, data, strict=True):
        # A writable copy: torch reads buffers it could write to.
        rows[block_id] = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(storage.device)
