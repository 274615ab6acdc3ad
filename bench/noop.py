"""Engines whose model computes nothing, at two depths, so that what is left is the host's own work.

NoOpEngine       in the engine's place: a step costs its answer's objects
engine_around    the real engine (inputs, attention's planning, sampling) around a decoder that returns zeros
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from engine.batch import Batch, RowOutput, StepOutput
from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.models.decoder import AttentionFn, Decoder
from engine.models.spec import DecoderSpec, RopeSpec
from engine.thread import WorkThread
from kvpool.layout import KVLayout

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 1024

TINY = DecoderSpec(
    num_layers=1,
    hidden_size=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=16,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=MAX_MODEL_LEN,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeSpec(),
    sliding_window=(None,),
)


class NoOpEngine:
    """A `StepEngine` that says the tokens of `script` in order of their positions.

    With `hops` each step visits a thread of its own, as the real engine's do; without, it answers at once.
    """

    def __init__(self, script: Sequence[int], num_blocks: int, vocab_size: int, *, hops: bool) -> None:
        self.info = EngineInfo(
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN,
            layout=KVLayout(1, 1, 1, BLOCK_SIZE, 4),
            dtype="float32",
            device="cpu",
            weight_bytes=0,
            kv_bytes=0,
            attention_backend="none",
        )
        self._script = tuple(script)
        self._worker = WorkThread("engine") if hops else None

    async def step(self, batch: Batch) -> StepOutput:
        """See `engine.batch.StepEngine`."""
        if self._worker is None:
            return self.step_sync(batch)
        return await self._worker.run(partial(self.step_sync, batch))

    def step_sync(self, batch: Batch) -> StepOutput:
        """The same in the caller's thread."""
        script, length = self._script, len(self._script)
        rows = tuple(
            RowOutput((script[(row.start + len(row.token_ids)) % length],) if row.sample else ()) for row in batch.rows
        )
        return StepOutput(batch.step, rows, 0.0, saved=tuple(b"" for _ in batch.saves))

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.close()


@dataclass(frozen=True, slots=True, eq=False)
class ZeroDecoder:
    """In a `Decoder`'s place: every hidden state and every logit is zero, and attention is never called."""

    spec: DecoderSpec
    hidden: Tensor
    zeros: Tensor
    device: torch.device
    dtype: torch.dtype = torch.float32
    weight_bytes: int = 0

    @classmethod
    def of(cls, spec: DecoderSpec, max_num_tokens: int) -> "ZeroDecoder":
        """A decoder for steps of at most `max_num_tokens` tokens."""
        hidden, logits = torch.zeros(max_num_tokens, spec.hidden_size), torch.zeros(max_num_tokens, spec.vocab_size)
        return cls(spec, hidden, logits, torch.device("cpu"))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """`[T, hidden]` zeros."""
        return self.hidden[: len(token_ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[N, vocab]` zeros."""
        return self.zeros[: len(hidden)]


def engine_around(max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> Engine:
    """The real engine over a decoder that computes nothing."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    decoder = ZeroDecoder.of(TINY, max_num_batched_tokens)
    return Engine.from_decoder(cast(Decoder, decoder), config)
