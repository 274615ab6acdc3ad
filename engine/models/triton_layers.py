"""The decoder's forward pass for a GPU: the small operators between matrix products fused into Triton kernels.

The twin of `Decoder.forward` over the same weights; `layers` holds the formulas, and tests hold the two together. A
fused operator computes in float32 and rounds once, so in 16 bits it may differ from its twin in the last digit.

    add_rms_norm                residual + branch, and its norm: one pass instead of two operators and three passes
    silu_multiply               silu(gate) * up, read where the matrix product left them
    rotate_and_attend           QK-norm, rotation and the write into the pool (in `engine.attention.triton_paged`)

Importing this module imports triton.
"""

# A kernel's parameters are its launch: many, and upper case where compile-time. Their types exist on the device.
# ruff: noqa: N803, PLR0913
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.triton_paged import TritonStep
from engine.models.decoder import Decoder
from engine.models.layers import Attention, AttentionFn, RMSNorm, Rotation

SILU_BLOCK = 1024
"""Elements that one program of `silu_multiply` takes."""

WIDE_ROW = 4096
"""A norm over more elements than that gets eight warps instead of four."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoder(Decoder):
    """A `Decoder` whose forward pass uses the fused operators. Make one with `of`; it shares the weights."""

    @classmethod
    def of(cls, decoder: Decoder) -> "FusedDecoder":
        """The fused twin of `decoder`."""
        return cls(**{field.name: getattr(decoder, field.name) for field in fields(Decoder)})

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """As `Decoder.forward`: `[T]`, `[T]` -> `[T, hidden]`. Rotation is fused when `attend` is a `TritonStep`."""
        rotate = self.rope(positions, self.dtype)
        hidden = self.embedding(token_ids)
        branch: Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden, normed = add_rms_norm(hidden, branch, layer.input_norm)
            branch = _attention(layer.attention, index, normed, rotate, attend)
            hidden, normed = add_rms_norm(hidden, branch, layer.mlp_norm)
            branch = layer.mlp.down(silu_multiply(layer.mlp.gate_up(normed)))
        return add_rms_norm(hidden, branch, self.norm)[1]


def _attention(attention: Attention, layer: int, x: Tensor, rotate: Rotation, attend: AttentionFn) -> Tensor:
    """`Attention.__call__`, fused where `attend` can take unrotated heads: `[T, hidden] -> [T, hidden]`."""
    if not isinstance(attend, TritonStep):
        return attention(layer, x, rotate, attend)
    norms = (attention.q_norm, attention.k_norm) if attention.q_norm and attention.k_norm else None
    qkv = attention.qkv(x).view(x.shape[0], -1, attention.head_dim)
    return attention.output(attend.rotate_and_attend(layer, qkv, rotate, norms).flatten(1))


def add_rms_norm(residual: Tensor, branch: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """`residual + branch` and its norm, all `[T, n]`. Without a branch the sum is `residual` itself."""
    num_rows, size = residual.shape
    total = residual if branch is None else torch.empty_like(residual)
    normed = torch.empty_like(residual)
    _add_rms_norm_kernel[(num_rows,)](
        residual,
        residual if branch is None else branch,
        total,
        normed,
        norm.weight,
        norm.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADDS=branch is not None,
        num_warps=8 if size > WIDE_ROW else 4,
    )
    return total, normed


def silu_multiply(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 n]`, gates first -> `[T, n]`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, SILU_BLOCK))
    _silu_multiply_kernel[grid](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=SILU_BLOCK)
    return out


@triton.jit
def _add_rms_norm_kernel(
    residual,
    branch,
    total,
    normed,
    weight,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One contiguous row a program. The sum is rounded before the norm, as if it had been stored in between."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    cells = tl.arange(0, BLOCK)
    mask = cells < SIZE
    x = tl.load(residual + row + cells, mask=mask, other=0.0)
    if ADDS:
        x = x + tl.load(branch + row + cells, mask=mask, other=0.0)
        tl.store(total + row + cells, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weights = tl.load(weight + cells, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row + cells, (x * scale * weights).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _silu_multiply_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    cells = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cells < SIZE
    gate = tl.load(gate_up + row * row_stride + cells, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + cells, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + cells, product.to(out.dtype.element_ty), mask=mask)
