"""How the kernels go about a product of so many rows: measured at load, once for each form that a model's weights have.

All ways give the same bits (`csrc/dot.h`), so nothing but speed depends on what is chosen here, on a machine however
busy. Knows packed matrices and a clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

import torch

from engine.quant.panels import NUM_HEIGHTS, PANEL_SIZE, PackedLinear

SLICED = 255
"""A slice of the weights is taken apart for all rows, instead of in registers for every tile of rows."""
_ROWS = tuple(2**power for power in range(NUM_HEIGHTS - 1))
_NUM_PRODUCTS = 8 * 1024 * 1024
_MAX_WEIGHTS = 1024 * 1024
"""Of one measurement: some ten milliseconds in all."""
_REPEATS = 3
_CLEARLY = 0.95


def measured_heights(
    matrices: Sequence[PackedLinear], clock: Callable[[], float] = time.thread_time
) -> tuple[int, ...]:
    """A height for 1, 2, 3-4, 5-8, ... 33-64 and more rows; 0 where the kernels' own choice is as good.

    The matrices are of one form and shape. Measurements walk over them, so that weights come from where they will come
    from in a step: from memory, if the model is larger than the caches.
    """
    heights = [fastest(_seconds(matrices, num_rows, clock)) for num_rows in _ROWS]
    return (*heights, heights[-1])


def fastest(seconds: Mapping[int, float]) -> int:
    """The height with the least time, if that is clearly less than the default's."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < _CLEARLY * seconds[0] else 0


def _seconds(matrices: Sequence[PackedLinear], num_rows: int, clock: Callable[[], float]) -> dict[int, float]:
    """The least of some repetitions by turns, for the default and whatever may be faster."""
    parts = _parts(matrices, min(_MAX_WEIGHTS, _NUM_PRODUCTS // num_rows))
    x = torch.ones(num_rows, matrices[0].num_inputs)
    least = {height: float("inf") for height in (0, *(h for h in (2, 4) if h <= num_rows), SLICED)}
    for _ in range(_REPEATS):
        for height in least:
            part = next(parts)
            part.set_heights((height,) * NUM_HEIGHTS)
            y = torch.empty(num_rows, part.num_outputs)
            start = clock()
            part.multiply_into(x, y, num_threads=1)
            least[height] = min(least[height], clock() - start)
    return least


def _parts(matrices: Sequence[PackedLinear], num_weights: int) -> Iterator[PackedLinear]:
    """Parts of about so many weights, all of one size, without end."""
    num_panels = min(max(1, num_weights // (PANEL_SIZE * matrices[0].num_inputs)), matrices[0].num_panels)
    for matrix in cycle(matrices):
        for first in range(0, matrix.num_panels - num_panels + 1, num_panels):
            yield matrix.part(first, num_panels)
