"""Affine quantization in groups along the input, as plain tensors: what GGUF's simple types and our own share.

    value[o, i] = scale[o, i // group] * q[o, i] + minimum[o, i // group]

Knows numbers; knows no file format and no kernel layout. `dequantize` is the meaning of everything that uses it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.quant.groups import GROUP_SIZE

_SMALLEST_NORMAL_HALF = 2.0**-14


@dataclass(frozen=True, slots=True)
class DenseForm:
    """A matrix kept as numbers of `dtype`: float32, bfloat16 or float16."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AffineForm:
    """How a quantized matrix is kept.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale: 16, 32, 64 or 128.
        scale_dtype: float16 or float32, of scales and minimums.
        input_bits: 16, or 8 with 8 bits and no minimums: what products round their inputs to, group by group, as they
            multiply integers. That belongs to the arithmetic; what is stored is the same.
    """

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    has_minimums: bool
    input_bits: int = 16


Form = DenseForm | AffineForm


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeight:
    """A quantized matrix `[out, in]`, `in` a multiple of the group size.

    Attributes:
        bits: 4 (q in 0..15 with minimums, in -8..7 without) or 8 (q in -128..127).
        q: `[out, in]` int8.
        scales: `[out, in / group]` float16 or float32.
        minimums: the same shape and type, or None for none.
    """

    bits: int
    q: Tensor
    scales: Tensor
    minimums: Tensor | None

    @property
    def form(self) -> AffineForm:
        """How this matrix is kept."""
        group_size = self.q.shape[1] // self.scales.shape[1]
        return AffineForm(self.bits, group_size, self.scales.dtype, self.minimums is not None)

    def dequantize(self) -> Tensor:
        """`[out, in]` float32."""
        grouped = self.q.view(*self.scales.shape, -1).float() * self.scales.float().unsqueeze(-1)
        if self.minimums is not None:
            grouped = grouped + self.minimums.float().unsqueeze(-1)
        return grouped.view(self.q.shape)


def is_stored_as(rows: AffineWeight, form: Form) -> bool:
    """Whether rows are kept just as `form` keeps them, whatever its products do with their inputs."""
    return isinstance(form, AffineForm) and rows.form == replace(form, input_bits=rows.form.input_bits)


def dense(rows: Tensor | AffineWeight) -> Tensor:
    """The numbers that stored rows stand for: a tensor as it is, a quantized matrix as float32."""
    return rows.dequantize() if isinstance(rows, AffineWeight) else rows


def quantize(
    weight: Tensor, bits: int, scale_dtype: torch.dtype = torch.float32, group_size: int = GROUP_SIZE
) -> AffineWeight:
    """Round a matrix `[out, in]` to the nearest affine form: symmetric for 8 bits, with a minimum for 4.

    Raises:
        ValueError: `in` is not a multiple of the group size, or other bits.
    """
    grouped = _groups(weight, group_size)
    scales, low = _scales_of(grouped, bits)
    scales, low = scales.to(scale_dtype), None if low is None else low.to(scale_dtype)
    shifted = grouped if low is None else grouped - low.float().unsqueeze(-1)
    q = torch.round(shifted / scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
    bounds = (-127, 127) if low is None else (0, 15)
    return AffineWeight(bits, q.clamp(*bounds).to(torch.int8).view(weight.shape), scales, low)


def half_scales_suffice(weight: Tensor, bits: int, group_size: int = GROUP_SIZE) -> bool:
    """Whether float16 holds the scales that `quantize` would find to its full precision, and no minimum overflows."""
    scales, low = _scales_of(_groups(weight, group_size), bits)
    used = scales[scales > 0]
    if not len(used):
        return True
    largest = scales.max() if low is None else torch.maximum(scales.max(), low.abs().max())
    return bool((used.min() >= _SMALLEST_NORMAL_HALF) & (largest <= torch.finfo(torch.float16).max))


def _groups(weight: Tensor, group_size: int) -> Tensor:
    if weight.shape[1] % group_size:
        raise ValueError(f"{weight.shape[1]} inputs are not whole groups of {group_size}")
    return weight.float().view(weight.shape[0], -1, group_size)


def _scales_of(grouped: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums `[out, groups]` of `[out, groups, group]`."""
    if bits == 8:
        return grouped.abs().amax(-1) / 127, None
    if bits == 4:
        low = grouped.amin(-1)
        return (grouped.amax(-1) - low) / 15, low
    raise ValueError(f"bits must be 4 or 8, got {bits}")
