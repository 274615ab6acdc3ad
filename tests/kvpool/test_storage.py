"""The pool's tensors: exact bytes, where a token lies, and copies in the order given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.layout import KVLayout
from kvpool.quant import LARGEST_CODE, quantize
from kvpool.storage import KVStorage
from kvpool.table import BlockCopy

CPU = torch.device("cpu")


def make_storage(
    num_blocks: int = 6, block_size: int = 4, num_layers: int = 3, dtype: torch.dtype = torch.float32
) -> KVStorage:
    storage = KVStorage(KVLayout(num_layers, 2, 5, block_size, dtype.itemsize), num_blocks, dtype, CPU)
    storage.data.copy_(torch.arange(storage.data.numel()).view(storage.data.shape))
    return storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (30, 3, 64, 16), (2, 8, 128, 3), (5, 1, 10, 7)], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 11])
def test_allocated_bytes_equal_the_formula(
    shape: tuple[int, int, int, int], num_blocks: int, dtype: torch.dtype
) -> None:
    num_layers, num_kv_heads, head_dim, block_size = shape
    storage = KVStorage(KVLayout(*shape, dtype.itemsize), num_blocks, dtype, CPU)
    formula = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize * block_size * num_blocks
    assert storage.allocated_bytes == formula == num_blocks * storage.layout.bytes_per_block
    assert storage.data.shape == (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
    assert storage.data.is_contiguous()


def test_a_dtype_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bytes"):
        KVStorage(KVLayout(1, 1, 1, 1, 4), 1, torch.float16, CPU)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_write_puts_each_token_where_its_slot_says(block_size: int) -> None:
    storage = make_storage(block_size=block_size)
    expected = storage.data.clone()
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(0))[:5]
    k, v = torch.randn(2, 5, 2, 5)
    storage.write(1, slots, k, v)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, slot % block_size] = k[token]
        expected[slot // block_size, 1, 1, slot % block_size] = v[token]
    assert torch.equal(storage.data, expected)


def test_write_takes_strided_views_and_int32_slots() -> None:
    plain, strided = make_storage(), make_storage()
    qkv = torch.randn(3, 7, 5)
    _, k, v = qkv.split([3, 2, 2], dim=1)
    plain.write(2, torch.tensor([4, 9, 0]), k.contiguous(), v.contiguous())
    strided.write(2, torch.tensor([4, 9, 0], dtype=torch.int32), k, v)
    assert torch.equal(plain.data, strided.data)


def test_write_of_nothing_changes_nothing() -> None:
    storage = make_storage()
    storage.write(0, torch.empty(0, dtype=torch.long), torch.empty(0, 2, 5), torch.empty(0, 2, 5))
    assert torch.equal(storage.data, make_storage().data)


def test_keys_and_values_are_views() -> None:
    storage = make_storage()
    storage.keys(1)[2, 3] = -1
    storage.values(2)[0, 1] = -2
    assert (storage.data[2, 1, 0, 3] == -1).all()
    assert (storage.data[0, 2, 1, 1] == -2).all()
    assert ((storage.data == -1).sum(), (storage.data == -2).sum()) == (10, 10)


copies = st.lists(st.builds(BlockCopy, st.integers(0, 5), st.integers(0, 5)), max_size=12)


@settings(deadline=None)
@given(copies)
def test_copies_act_as_if_one_after_the_other(orders: list[BlockCopy]) -> None:
    storage = make_storage()
    expected = storage.data.clone()
    for order in orders:
        expected[order.target_id] = expected[order.source_id].clone()
    storage.copy_blocks(orders)
    assert torch.equal(storage.data, expected)


@pytest.mark.parametrize(
    "orders",
    [
        [BlockCopy(0, 1), BlockCopy(1, 2)],  # reads what was just written
        [BlockCopy(0, 1), BlockCopy(2, 0)],  # overwrites what was just read
        [BlockCopy(0, 1), BlockCopy(2, 1)],  # the later one wins
        [BlockCopy(0, 1), BlockCopy(1, 0)],  # no swap: both end as block 0
        [BlockCopy(3, 3)],
    ],
)
def test_copies_that_touch_each_other(orders: list[BlockCopy]) -> None:
    test_copies_act_as_if_one_after_the_other.hypothesis.inner_test(orders)


def test_more_copies_than_one_run_holds() -> None:
    storage = make_storage(num_blocks=200)
    expected = storage.data.clone()
    expected[100:] = expected[:100]
    storage.copy_blocks([BlockCopy(i, 100 + i) for i in range(100)])
    assert torch.equal(storage.data, expected)


# -------------------------------------------------------------------------------------------------- quantized pools

QUANTIZED = list(LARGEST_CODE)


def make_quantized(dtype: torch.dtype, num_blocks: int = 6, block_size: int = 4) -> KVStorage:
    storage = KVStorage(KVLayout(3, 2, 6, block_size, 1, 2), num_blocks, dtype, CPU)
    storage.blocks.copy_(torch.randint(0, 120, storage.blocks.shape, generator=torch.Generator().manual_seed(5)))
    return storage


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (30, 3, 64, 16), (2, 8, 128, 3), (5, 2, 5, 7)], ids=str)
def test_quantized_bytes_equal_the_formula(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_layers, num_kv_heads, head_dim, block_size = shape
    storage = KVStorage(KVLayout(*shape, 1, 2), 7, dtype, CPU)
    assert storage.allocated_bytes == 7 * block_size * 2 * num_layers * num_kv_heads * (head_dim + 2)
    assert storage.allocated_bytes == 7 * storage.layout.bytes_per_block
    assert storage.data.shape == (7, num_layers, 2, block_size, num_kv_heads, head_dim)
    assert storage.dtype == dtype
    assert storage.scales is not None
    assert storage.scales.shape == storage.data.shape[:-1]


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_codes_and_scales_fill_the_allocation_without_overlap(dtype: torch.dtype) -> None:
    storage = make_quantized(dtype)
    assert storage.scales is not None
    storage.blocks.zero_()
    storage.data.view(torch.uint8).fill_(1)
    storage.scales.fill_(0.0)
    assert storage.blocks.sum() == storage.data.numel()
    storage.scales.view(torch.int16).fill_(0x0101)
    assert (storage.blocks == 1).all()


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_write_quantizes_each_head_of_each_token_where_its_slot_says(dtype: torch.dtype, block_size: int) -> None:
    storage = make_quantized(dtype, block_size=block_size)
    before = storage.blocks.clone()
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(0))[:5]
    k, v = torch.randn(2, 5, 2, 6)
    storage.write(1, slots, k, v)
    assert storage.scales is not None
    for token, slot in enumerate(slots.tolist()):
        place = (slot // block_size, 1, slice(None), slot % block_size)
        codes, scales = quantize(torch.stack((k[token], v[token])), dtype)
        assert torch.equal(storage.data[place].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(storage.scales[place], scales)
    untouched = make_quantized(dtype, block_size=block_size)
    assert untouched.scales is not None
    for slot in slots.tolist():
        place = (slot // block_size, 1, slice(None), slot % block_size)
        untouched.data[place], untouched.scales[place] = storage.data[place], storage.scales[place]
    assert torch.equal(storage.blocks, untouched.blocks)
    assert not torch.equal(storage.blocks, before)


@pytest.mark.parametrize("dtype", [*QUANTIZED, torch.float32], ids=str)
def test_rows_read_back_what_was_written(dtype: torch.dtype) -> None:
    storage = make_storage() if dtype == torch.float32 else make_quantized(dtype)
    k, v = torch.randn(2, 5, *storage.data.shape[-2:])
    slots = torch.tensor([4, 9, 0, 23, 10])
    storage.write(2, slots, k, v)
    rows = storage.rows_of(slots) + 2 * storage.layer_stride
    tolerance = {torch.float32: 0.0, torch.int8: 0.015, torch.float8_e4m3fn: 0.12}[dtype]
    torch.testing.assert_close(storage.read_rows(rows), k, atol=tolerance, rtol=0)
    torch.testing.assert_close(storage.read_rows(rows + storage.layout.block_size), v, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_block_is_copied_with_its_scales(dtype: torch.dtype) -> None:
    storage = make_quantized(dtype)
    expected = storage.blocks.clone()
    expected[5], expected[0] = expected[2], expected[4]
    storage.copy_blocks([BlockCopy(2, 5), BlockCopy(4, 0)])
    assert torch.equal(storage.blocks, expected)
    assert storage.blocks[3].is_contiguous()
    assert storage.blocks[3].numel() == storage.layout.bytes_per_block


def test_codes_without_a_place_for_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="no quantized KV cache"):
        KVStorage(KVLayout(1, 1, 2, 1, 1, 2), 1, torch.uint8, CPU)
    with pytest.raises(ValueError, match="2 bytes, not 4"):
        KVStorage(KVLayout(1, 1, 2, 1, 1, 4), 1, torch.int8, CPU)
    with pytest.raises(ValueError, match="even number"):
        KVStorage(KVLayout(1, 1, 5, 1, 1, 2), 1, torch.int8, CPU)
