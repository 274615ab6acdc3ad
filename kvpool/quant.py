"""Keys and values in eight bits: codes, and one float16 scale for each head of each token.

    value = code * scale          scale = the head's largest magnitude / the largest code, rounded to float16

A scale belongs to one head of one token, so a token is written once and never touched again, whatever is appended after
it. Codes are chosen for the scale as it is stored, so its rounding costs nothing. The kernels that write codes of their
own (`engine/csrc`, Triton) follow these formulas to the bit. Knows numbers; knows no blocks.

    int8    127 steps each way, evenly spaced: the smallest error for values that spread evenly
    fp8     e4m3 (Micikevicius et al. 2022): four bits of exponent, for heads whose channels differ much in size
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

SCALE_DTYPE = torch.float16
MAX_SCALE = torch.finfo(SCALE_DTYPE).max

LARGEST_CODE: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
"""Code types, and the largest magnitude of each."""

CODE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
"""By the names of `kvpool.layout.KV_CACHE_DTYPES`."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[..., head_dim]` in any float type -> codes of the same shape in `dtype`, and scales `[...]` in float16.

    NaN stays NaN: its head's scale is. Infinities become the largest number that fits.
    """
    largest = LARGEST_CODE[dtype]
    x = x.float()
    scales = (x.abs().amax(dim=-1) * (1.0 / largest)).clamp_(max=MAX_SCALE).to(SCALE_DTYPE)
    # A head of zeros, or smaller than any scale: all codes are 0 then, whatever they are multiplied with.
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    codes = (x * inverse[..., None]).clamp_(-largest, largest)
    return (codes.round_() if dtype == torch.int8 else codes).nan_to_num_(0.0).to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes `[..., head_dim]` and scales `[...]` -> float32 `[..., head_dim]`; exact, as 8 and 11 bits fit."""
    return codes.float() * scales.float()[..., None]
