"""Memory for weights: few large mappings, on huge pages where the system has them.

A decode step reads every weight once, so every page costs a walk through the page tables; of 2 MiB instead of 4 KiB
there are five hundred times fewer, and a core's own prefetcher, which stops at each, goes on for longer. Matrices share
mappings, as most are smaller than one such page. Knows bytes only; a mapping lives until its last tensor dies.
"""

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

Zeros = Callable[[int, torch.dtype], Tensor]
"""Where a matrix takes its memory from: `[size]` zeros of a type."""

CHUNK_BYTES = 64 * 2**20
"""Of a mapping. Untouched pages of the last one take no memory."""
_ALIGNMENT = 64


class WeightArena:
    """Gives out zeroed tensors on the CPU, one after the other."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """`[size]` zeros, 64-byte aligned.

        Raises:
            MemoryError: the system gives no more.
        """
        num_bytes = size * dtype.itemsize
        if num_bytes > len(self._chunk) - self._num_used:
            self._chunk, self._num_used = _mapped(max(CHUNK_BYTES, num_bytes)), 0
        first = self._num_used
        self._num_used = min(len(self._chunk), -(-(first + num_bytes) // _ALIGNMENT) * _ALIGNMENT)
        return self._chunk[first : first + num_bytes].view(dtype)


def on_heap(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros by themselves: for a matrix that stands alone."""
    return torch.zeros(size, dtype=dtype)


def on_meta(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory: to count bytes before anything is loaded."""
    return torch.zeros(size, dtype=dtype, device="meta")


def _mapped(num_bytes: int) -> Tensor:
    """A fresh anonymous mapping as `[num_bytes]` uint8; it ends with the last tensor that looks into it."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {num_bytes} bytes for weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small pages serve
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
