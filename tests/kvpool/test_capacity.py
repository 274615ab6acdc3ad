"""The arithmetic of a memory, against numbers worked out by hand."""

from dataclasses import replace

from kvpool.capacity import Capacity
from kvpool.layout import KVLayout

GIB = 1 << 30
LLAMA_3_8B = KVLayout(32, 8, 128, 16, 2)  # 131,072 bytes a token
ON_24_GIB = Capacity(24 * GIB, 16_060_522_496, GIB, LLAMA_3_8B)


def test_llama_3_8b_on_24_gib() -> None:
    """25,769,803,776 - 16,060,522,496 - 1,073,741,824 = 8,635,539,456 bytes; / 131,072 = 65,883.9 tokens."""
    assert ON_24_GIB.kv_budget_bytes == 8_635_539_456
    assert ON_24_GIB.num_tokens == 65_883
    assert ON_24_GIB.num_blocks == 4_117  # x 16 = 65,872
    assert ON_24_GIB.num_users(8_192) == 8  # 512 blocks each
    assert ON_24_GIB.num_users(8_193) == 8  # 513 blocks each
    assert ON_24_GIB.num_users(65_873) == 0
    assert ON_24_GIB.longest_context(10) == 411 * 16


def test_the_same_with_an_eight_bit_cache() -> None:
    """66,560 bytes a token: 8,635,539,456 / 66,560 = 129,740.7."""
    quantized = replace(ON_24_GIB, layout=KVLayout(32, 8, 128, 16, 1, 2))
    assert quantized.num_tokens == 129_740
    assert quantized.num_users(8_192) == 15


def test_smollm2_in_a_gib() -> None:
    """1,073,741,824 - 269,030,016 = 804,711,808; / 23,040 = 34,926.7 tokens, 2,182 blocks of 368,640 bytes."""
    capacity = Capacity(GIB, 269_030_016, 0, KVLayout(30, 3, 64, 16, 2))
    assert (capacity.num_tokens, capacity.num_blocks) == (34_926, 2_182)
    assert capacity.num_users(2_048) == 17


def test_what_does_not_fit() -> None:
    tight = replace(ON_24_GIB, memory_bytes=16 * GIB)
    assert tight.kv_budget_bytes == 17_179_869_184 - 16_060_522_496 - GIB
    smaller = replace(ON_24_GIB, memory_bytes=8 * GIB)
    assert smaller.kv_budget_bytes < 0
    assert (smaller.num_tokens, smaller.num_blocks, smaller.num_users(1)) == (0, 0, 0)


def test_the_memory_it_takes_is_just_enough() -> None:
    for context, users in ((8_192, 8), (100, 3), (1, 1)):
        needed = ON_24_GIB.memory_for(context, users)
        assert replace(ON_24_GIB, memory_bytes=needed).num_users(context) == users
        assert replace(ON_24_GIB, memory_bytes=needed - 1).num_users(context) == users - 1
