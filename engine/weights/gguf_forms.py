"""GGUF tensor types that can be kept as they are stored: floats, and those that are affine in groups of 32 or 16.

Each is decoded to the integers, scales and minimums that the file holds; nothing is rounded. Block layouts are those of
the ggml project's `ggml-common.h`. Knows bytes; knows no files and no models.

    type         columns  bytes of a block                                            value of column i
    Q8_0              32  d f16, q int8 x 32                                          d q
    Q4_0              32  d f16, low and high halves of 16 bytes                      d (q - 8)
    Q4_1              32  d f16, m f16, the same                                      d q + m
    Q5_0              32  d f16, fifth bits u32, the same                             d (q - 16)
    Q5_1              32  d f16, m f16, fifth bits u32, the same                      d q + m
    Q4_K             256  d f16, e f16, 12 bytes of s and m (6 bits), 128 of q        d s q - e m
    Q5_K             256  d f16, e f16, 12 bytes of s and m, 32 of fifth bits, 128    d s q - e m
    Q6_K             256  128 low bits, 64 high bits, s int8 x 16, d f16              d s (q - 32)
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from engine.quant.affine import AffineForm, AffineWeight, DenseForm, Form

Bytes = npt.NDArray[np.uint8]

FLOAT32 = DenseForm(torch.float32)
STORED_FORMS: dict[Type, Form] = {
    Type.F32: FLOAT32,
    Type.F16: DenseForm(torch.float16),
    Type.BF16: DenseForm(torch.bfloat16),
    Type.Q8_0: AffineForm(8, 32, torch.float16, has_minimums=False),
    Type.Q4_0: AffineForm(4, 32, torch.float16, has_minimums=False),
    Type.Q4_1: AffineForm(4, 32, torch.float16, has_minimums=True),
    Type.Q5_0: AffineForm(8, 32, torch.float16, has_minimums=False),
    Type.Q5_1: AffineForm(8, 32, torch.float16, has_minimums=True),
    Type.Q4_K: AffineForm(4, 32, torch.float32, has_minimums=True),
    Type.Q5_K: AffineForm(8, 32, torch.float32, has_minimums=True),
    Type.Q6_K: AffineForm(8, 16, torch.float32, has_minimums=False),
}
"""Types that are kept, and the form they have in memory. Five and six bits take eight."""


def decode_rows(kind: Type, encoded: Bytes) -> torch.Tensor | AffineWeight:
    """Rows of a matrix, `[rows, bytes per row]`, in the form of their type: a dense tensor, or integers with scales."""
    form = STORED_FORMS[kind]
    if isinstance(form, DenseForm):
        return torch.from_numpy(np.array(encoded)).view(form.dtype)
    blocks = np.ascontiguousarray(encoded).reshape(-1, GGML_QUANT_SIZES[kind][1])
    q, scales, minimums = _DECODERS[kind](blocks)
    num_rows = len(encoded)
    return AffineWeight(
        form.bits,
        torch.from_numpy(np.ascontiguousarray(q).view(np.int8)).view(num_rows, -1),
        torch.from_numpy(scales).view(num_rows, -1),
        None if minimums is None else torch.from_numpy(minimums).view(num_rows, -1),
    )


Decoded = tuple[npt.NDArray[np.int8] | Bytes, npt.NDArray[np.floating], npt.NDArray[np.floating] | None]
"""q `[blocks, columns]`, scales and minimums `[blocks, groups]`."""


def _q8_0(blocks: Bytes) -> Decoded:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Decoded:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Bytes) -> Decoded:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Decoded:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of byte i: column i of group g
    return _k_nibbles(blocks[:, 48:]) | (high << 4).reshape(len(blocks), 256), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Decoded:
    """Two halves of 128 columns; in each, 64 bytes of low nibbles and 32 bytes of high pairs, spread over four runs."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=2)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(len(blocks), 256).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208).astype(np.float32)
    return q, scales, None


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """`[blocks, 1]` float16 from byte `at` on."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """16 bytes to 32 columns: low halves, then high halves."""
    packed = np.ascontiguousarray(packed)  # numpy takes three times as long over rows with gaps between them
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of 4 bytes as 16 in column i."""
    bits: Bytes = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes to 256 columns: 32 bytes hold one group in their low halves, the next in their high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 256)


def _k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and minimums `[blocks, 8]`. Of the 12 bytes, groups 0..3 use the low six bits of bytes 0..7; groups 4..7
    the low and high halves of bytes 8..11, with their two highest bits on top of bytes 0..7."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=1)
    lows = np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=1)
    scales = _half(blocks, 0).astype(np.float32) * steps.astype(np.float32)
    return scales, -(_half(blocks, 2).astype(np.float32) * lows.astype(np.float32))


_DECODERS: dict[Type, Callable[[Bytes], Decoded]] = {
    Type.Q8_0: _q8_0,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
