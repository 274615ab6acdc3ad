"""The arithmetic of KV memory."""

import pytest

from kvpool.layout import KVLayout, element_and_scale_bytes


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"),
    [
        (KVLayout(30, 3, 64, 16, 4), 46_080),  # SmolLM2-135M in float32
        (KVLayout(30, 3, 64, 16, 2), 23_040),
        (KVLayout(32, 8, 128, 16, 2), 131_072),  # Llama-3-8B in bfloat16
        (KVLayout(1, 1, 1, 1, 1), 2),
    ],
)
def test_bytes(layout: KVLayout, bytes_per_token: int) -> None:
    assert layout.bytes_per_token == bytes_per_token
    assert layout.bytes_per_block == bytes_per_token * layout.block_size
    size = layout.element_bytes
    for length in layout.block_shape():
        size *= length
    assert size == layout.bytes_per_block


def test_how_many_blocks_fit() -> None:
    layout = KVLayout(2, 2, 8, 4, 2)
    assert layout.bytes_per_block == 512
    assert [layout.num_blocks_in(budget) for budget in (-1, 0, 511, 512, 1535, 1536)] == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("field", range(5))
def test_shapes_must_be_positive(field: int) -> None:
    numbers = [1, 1, 1, 1, 1]
    numbers[field] = 0
    with pytest.raises(ValueError, match="at least 1"):
        KVLayout(*numbers)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_eight_bits_hold_nearly_twice_the_tokens(head_dim: int) -> None:
    """1.9 at least against sixteen bits, scales included."""
    wide = KVLayout(32, 8, head_dim, 16, *element_and_scale_bytes("auto", 2))
    for name in ("int8", "fp8"):
        narrow = KVLayout(32, 8, head_dim, 16, *element_and_scale_bytes(name, 2))
        budget = 1 << 32
        assert narrow.num_blocks_in(budget) >= 1.9 * wide.num_blocks_in(budget)
        assert wide.bytes_per_token / narrow.bytes_per_token == 2 * head_dim / (head_dim + 2)


def test_quantized_bytes_by_hand() -> None:
    layout = KVLayout(30, 3, 64, 16, 1, 2)  # SmolLM2-135M: 2 x 30 x 3 x (64 + 2) bytes a token
    assert (layout.cell_bytes, layout.bytes_per_token, layout.bytes_per_block) == (198, 11_880, 190_080)
    assert KVLayout(32, 8, 128, 16, 1, 2).bytes_per_token == 66_560  # Llama-3-8B


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, fp8, int8"):
        element_and_scale_bytes("int3", 2)
    with pytest.raises(ValueError, match="scale_bytes"):
        KVLayout(1, 1, 1, 1, 1, -1)
