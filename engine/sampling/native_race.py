"""The race through the native kernel of `csrc/sampling.cpp`: one pass over the logits, logarithms for the few tokens
that can still win. Describes rows of logits to the kernel and knows nothing else.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from engine.native import find_native
from engine.sampling.race import Border, Race, TorchRace
from engine.sampling.rng import Keys


class _RaceArgs(ctypes.Structure):
    """`RaceArgs` of `csrc/sampling.cpp`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "ids", "keys", "border_logits", "border_ids")),
        *((name, ctypes.c_void_p) for name in ("tokens", "peaks", "counts", "shares")),
        *((name, ctypes.c_int32) for name in ("rows", "width", "num_threads")),
    )


class NativeRace:
    """`Race` on the CPU. Rows are shared out among torch's threads; a row's bits do not depend on how."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._race = kernels.quire_race
        self._ahead = kernels.quire_ahead

    def winners(
        self, x: Tensor, keys: Keys, *, ids: Tensor | None = None, border: Border | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Race`."""
        x, keys = x.contiguous(), np.ascontiguousarray(keys)
        ids = None if ids is None else ids.contiguous()
        tokens = torch.empty(len(x), dtype=torch.int64)
        peaks = torch.empty(len(x), dtype=torch.float32)
        args = _describe(x, border)
        args.ids, args.keys = None if ids is None else ids.data_ptr(), keys.ctypes.data
        args.tokens, args.peaks = tokens.data_ptr(), peaks.data_ptr()
        self._race(ctypes.byref(args))
        return tokens, peaks

    def ahead(self, x: Tensor, border: Border) -> tuple[Tensor, Tensor]:
        """See `Race`."""
        x = x.contiguous()
        counts = torch.empty(len(x), dtype=torch.int64)
        shares = torch.empty(len(x), dtype=torch.float64)
        args = _describe(x, border)
        args.counts, args.shares = counts.data_ptr(), shares.data_ptr()
        self._ahead(ctypes.byref(args))
        return counts, shares


def best_race(device: torch.device) -> Race:
    """The native race where this device has it, else torch's."""
    kernels = find_native() if device.type == "cpu" else None
    return TorchRace() if kernels is None else NativeRace(kernels)


def _describe(x: Tensor, border: Border | None) -> _RaceArgs:
    """What both kernels read. Addresses only: the caller keeps the tensors."""
    assert x.dtype == torch.float32, "the pipeline computes in float32"
    assert x.device.type == "cpu", "the native race runs on the CPU"
    args = _RaceArgs(logits=x.data_ptr(), rows=len(x), width=x.shape[-1], num_threads=torch.get_num_threads())
    if border is not None:
        assert border.logits.is_contiguous()
        assert border.ids.is_contiguous()
        args.border_logits, args.border_ids = border.logits.data_ptr(), border.ids.data_ptr()
    return args
