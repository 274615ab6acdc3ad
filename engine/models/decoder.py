"""The forward pass of a decoder over a flat ragged batch: every token of every sequence of a step in one `[T]`.

Knows weights and positions. Which tokens belong together, and where their keys and values live, is the business of the
`AttentionFn` that the caller passes in: prefill, decode, cached and cacheless runs all use this one forward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.layers import AttentionFn, DecoderLayer, Embedding, Linear, RMSNorm
from engine.models.rope import RotaryEmbedding
from engine.models.spec import DecoderSpec

__all__ = ["AttentionFn", "Decoder"]


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A loaded model on one device.

    Attributes:
        dtype: of keys and values, and of the computation; packed weights are computed with in float32 all the same.
            Weights may be stored in smaller forms.
        weight_bytes: counts every stored parameter once, so a tied head adds nothing.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear
    rope: RotaryEmbedding

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: `[T]` int64, on the model's device.
            positions: `[T]` int64, each token's position in its own sequence.
            attend: see `AttentionFn`; called once per layer, in order.

        Returns:
            `[T, hidden]` in the dtype of the computation.
        """
        hidden = self.embedding(token_ids)
        rotate = self.rope(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, rotate, attend)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: `[N, hidden] -> [N, vocab]` float32. Pass only the rows that are needed."""
        return self.head(hidden).float()
