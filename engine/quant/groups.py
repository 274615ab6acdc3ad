"""How many inputs of a quantized matrix share a scale. Torch-free: bytes are counted without it."""

GROUP_SIZE = 32
"""What every quantized matrix is whole groups of."""
LARGE_GROUP_SIZES = (128, 64, GROUP_SIZE)


def largest_group(num_inputs: int) -> int:
    """The largest group size that `num_inputs`, whole groups of 32, are whole groups of."""
    return next(size for size in LARGE_GROUP_SIZES if num_inputs % size == 0)
