"""The pieces a decoder layer is made of: small functions and the weights they use.

Knows tensors of a flat ragged batch `[T, ...]`; knows nothing of sequences, caches or checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, head_dim]) -> [T, heads, head_dim]`.

Stores k and v itself and applies the scale `head_dim ** -0.5`. The inputs may be strided views of one tensor.
"""


class Linear(Protocol):
    """A matrix product, however its matrix is stored: `x @ weight.T + bias`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""


class Embedding(Protocol):
    """Token ids to vectors, however the table is stored."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, hidden]`."""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A plain matrix: weight `[out, in]`, bias `[out]` or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    """A plain table `[vocab, hidden]`."""

    weight: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, hidden]`."""
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019), computed in float32 inside."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., n] -> [..., n]`; rounded to the dtype of `x` at the end. One kernel on CUDA."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one batch's positions, each `[T, 1, head_dim / 2]`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the pairs `(i, i + head_dim / 2)` of every head: `[T, heads, head_dim]` (Su et al. 2021)."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention around an `AttentionFn`; queries, keys and values come from one matrix product.

    qkv weight `[(heads + 2 kv_heads) * head_dim, hidden]`: all query heads, then key heads, then value heads.
    """

    qkv: Linear
    output: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, layer: int, x: Tensor, rotate: Rotation, attend: AttentionFn) -> Tensor:
        """`[T, hidden] -> [T, hidden]`."""
        num_heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(self.qkv(x).view(x.shape[0], -1, self.head_dim), num_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(layer, rotate(q), rotate(k), v)
        return self.output(mixed.flatten(1))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020); gate and up are one matrix `[2 * intermediate, hidden]`."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, hidden] -> [T, hidden]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm block: two branches, each added to a residual stream that nothing else touches."""

    input_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, layer: int, hidden: Tensor, rotate: Rotation, attend: AttentionFn) -> Tensor:
        """`[T, hidden] -> [T, hidden]`."""
        hidden = hidden + self.attention(layer, self.input_norm(hidden), rotate, attend)
        return hidden + self.mlp(self.mlp_norm(hidden))
