"""Attention without any cache: whole sequences in, whole sequences out, one row of scores at a time if need be."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.decoder import AttentionFn, Decoder
from engine.models.spec import DecoderSpec


def naive_attention(spec: DecoderSpec, lengths: Sequence[int]) -> AttentionFn:
    """An `AttentionFn` for sequences of `lengths` tokens laid end to end, each complete from position 0."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        return torch.cat([_attend_one(*part, spec.sliding_window[layer]) for part in parts])

    return attend


def _attend_one(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    positions = torch.arange(len(q), device=q.device)
    distance = positions[:, None] - positions[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def naive_logits(decoder: Decoder, *sequences: Sequence[int]) -> Tensor:
    """Logits after every token of every sequence, recomputed from nothing: `[sum of lengths, vocab]` float32."""
    lengths = [len(sequence) for sequence in sequences]
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], device=decoder.device)
    positions = torch.cat([torch.arange(length, device=decoder.device) for length in lengths])
    with torch.inference_mode():
        return decoder.logits(decoder.forward(token_ids, positions, naive_attention(decoder.spec, lengths)))


def naive_greedy(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after `prompt`, the whole sequence recomputed for each one."""
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            positions = torch.arange(len(token_ids), device=decoder.device)
            attend = naive_attention(decoder.spec, [len(token_ids)])
            hidden = decoder.forward(torch.tensor(token_ids, device=decoder.device), positions, attend)
            token_ids.append(int(decoder.logits(hidden[-1:]).argmax()))
    return token_ids[len(prompt) :]
