"""Whole blocks as bytes: what comes out goes back in, in every number type."""

import pytest
import torch

from kvpool.layout import KVLayout, element_and_scale_bytes
from kvpool.quant import CODE_DTYPES
from kvpool.storage import KVStorage
from kvpool.transfer import export_blocks, load_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, **CODE_DTYPES}


def make(name: str) -> KVStorage:
    dtype = DTYPES[name]
    element_bytes, scale_bytes = element_and_scale_bytes(name if name in CODE_DTYPES else "auto", dtype.itemsize)
    layout = KVLayout(3, 2, 8, 4, element_bytes, scale_bytes)
    storage = KVStorage(layout, 6, dtype, torch.device("cpu"))
    for layer in range(layout.num_layers):
        slots = torch.arange(6 * 4)
        storage.write(
            layer, slots, torch.randn(24, 2, 8).to(storage_type(dtype)), torch.randn(24, 2, 8).to(storage_type(dtype))
        )
    return storage


def storage_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in CODE_DTYPES.values() else dtype


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_blocks_come_back_bit_for_bit_in_other_places(name: str) -> None:
    source, target = make(name), make(name)
    before = target.blocks.view(torch.uint8).clone()
    data = export_blocks(source, [4, 1])
    assert [len(piece) for piece in data] == [source.layout.bytes_per_block] * 2
    load_blocks(target, [0, 5], data)
    after = target.blocks.view(torch.uint8)
    assert torch.equal(after[[0, 5]], source.blocks.view(torch.uint8)[[4, 1]])
    assert torch.equal(after[1:5], before[1:5])
    for layer in range(3):
        slots = target.rows_of(torch.arange(4)) + layer * target.layer_stride
        there = source.rows_of(torch.arange(16, 20)) + layer * source.layer_stride
        assert torch.equal(target.read_rows(slots), source.read_rows(there))


def test_nothing_costs_nothing() -> None:
    storage = make("float32")
    assert export_blocks(storage, []) == ()
    load_blocks(storage, [], [])


def test_a_piece_of_another_size_is_refused_before_anything_is_written() -> None:
    storage = make("float32")
    before = storage.blocks.clone()
    [good] = export_blocks(storage, [1])
    with pytest.raises(ValueError, match="cannot be filled"):
        load_blocks(storage, [0, 2], [good, good[:-1]])
    assert torch.equal(storage.blocks, before)
