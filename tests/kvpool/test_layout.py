"""The arithmetic of KV memory."""

import pytest

from kvpool.layout import KVLayout


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
