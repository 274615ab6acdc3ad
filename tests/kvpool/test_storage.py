"""The pool's tensors: exact bytes, where a token lies, and copies in the order given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.layout import KVLayout
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
