"""Rotary position embeddings and their scalings for long contexts.

Knows one formula per `RopeSpec.kind`, each named with its source. A scaling here is always a fixed set of frequencies:
keys in a cache were rotated once and cannot be rotated again, so nothing may depend on how long a sequence is now.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.layers import Rotation
from engine.models.spec import RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class RotaryEmbedding:
    """Positions to cosines and sines. `frequencies` `[head_dim / 2]` float32, radians per token."""

    frequencies: Tensor
    attention_factor: float

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """`[T]` int64 -> a rotation for `[T, heads, head_dim]`. Angles are float32, the result is in `dtype`."""
        angles = (positions[:, None].float() * self.frequencies)[:, None, :]
        cos = (angles.cos() * self.attention_factor).to(dtype)
        sin = (angles.sin() * self.attention_factor).to(dtype)
        return Rotation(cos, sin)


def rotary_embedding(rope: RopeSpec, head_dim: int, context: int, device: torch.device) -> RotaryEmbedding:
    """The embedding of a model served with sequences of at most `context` tokens (only `dynamic` looks at it)."""
    frequencies = rope_frequencies(rope, head_dim, context).to(device)
    return RotaryEmbedding(frequencies, rope.attention_factor)


def rope_frequencies(rope: RopeSpec, head_dim: int, context: int) -> Tensor:
    """Radians per token of each rotated pair: `[head_dim / 2]` float32, on the CPU."""
    if rope.kind == "dynamic":
        return _geometric(_dynamic_theta(rope, head_dim, context), head_dim)
    plain = _geometric(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "factors":
        return plain / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    return plain


def _geometric(theta: float, head_dim: int) -> Tensor:
    """`theta ** (-2 i / head_dim)` for pair `i` (RoFormer, Su et al. 2021, section 3.2.2)."""
    return 1.0 / _wavelength_scale(theta, head_dim)


def _wavelength_scale(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    scale: Tensor = theta**exponents
    return scale


def _dynamic_theta(rope: RopeSpec, head_dim: int, context: int) -> float:
    """NTK-aware base for a context of `context` tokens; the trained base up to the trained length.

    theta' = theta * (s L / L0 - (s - 1)) ** (d / (d - 2)): the "Dynamic NTK" rule (emozilla 2023; YaRN, Peng et al.
    2023, section 3.3). As published, `L` is the current length of the sequence, and every growth re-rotates all keys.
    With a cache, `L` is instead the longest sequence that is served, for all sequences alike; so the result equals the
    published rule for sequences of exactly that length, and for every length when `L <= L0`.
    """
    length = max(context, rope.original_context)
    stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    Source: the reference implementation published with Llama 3.1 (`apply_scaling`).
    """
    rotations = rope.original_context * plain / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2, "NTK-by-parts"): a ramp over pairs between kept and divided frequencies."""
    low, high = (_yarn_pair(rope, head_dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    scale = _wavelength_scale(rope.theta, head_dim)
    return divided / (rope.factor * scale) + (1 - divided) / scale


def _yarn_pair(rope: RopeSpec, head_dim: int, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times over the trained context."""
    per_turn = rope.original_context / (rotations * 2 * math.pi)
    return head_dim * math.log(per_turn) / (2 * math.log(rope.theta))
