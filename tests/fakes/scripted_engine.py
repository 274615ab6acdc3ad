"""A step engine that says what its prompt tells it to, through the real sampler: `SAY:hello|` is answered with "hello".

The scripted token has by far the highest logit, every other token a fixed small one, so sampling settings, logprobs,
masks and seeds act as they do on a model. Without a marker it counts "1, 2, 3, ...". Keeps no KV and checks no tables.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from engine.batch import Batch, Row, RowOutput, SlotStart, StepOutput, TokenLogprob
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from server.text.tokenizer import Tokenizer

COUNT = ", ".join(map(str, range(1, 400)))
PEAK = 4.0


@dataclass
class ScriptedEngine:
    """Attributes:
    step_s: how long each step takes.
    peak: logit of the scripted token; the others lie within 0..3.
    script: prompt ids -> the tokens to say, instead of the marker.
    fail: called with each batch; may raise what the step raises.
    gate: when set, steps wait for it before they do anything.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_id: int
    max_num_seqs: int = 8
    step_s: float = 0.0
    peak: float = PEAK
    script: Callable[[tuple[int, ...]], list[int]] | None = None
    fail: Callable[[Batch], None] | None = None
    gate: asyncio.Event | None = None
    batches: list[Batch] = field(default_factory=list)
    starts: list[SlotStart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.max_num_seqs, self.vocab_size, torch.device("cpu"))
        self._scripts: dict[int, list[int]] = {}
        self._num_output: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}

    async def step(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        await asyncio.sleep(self.step_s)
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            self.fail(batch)
        for start in batch.starts:
            self._start(start)
        slots = [row.slot for row in batch.rows if row.sample]
        self.sampler.begin(slots)
        logits = torch.stack([self._logits(slot) for slot in slots]) if slots else None
        sampled = iter(self.sampler.sample(slots, logits) if logits is not None else [])
        rows = []
        for row in batch.rows:
            prompt = self._prompt_logprobs(row)
            if not row.sample:
                rows.append(RowOutput(prompt_logprobs=prompt))
                continue
            self._num_output[row.slot] += 1
            rows.append(next(sampled)._replace(prompt_logprobs=prompt))
        return StepOutput(batch.step, tuple(rows), self.step_s)

    def _start(self, start: SlotStart) -> None:
        self.starts.append(start)
        self.sampler.start(start)
        self._scripts[start.slot] = self._script(start.prompt_ids)
        self._num_output[start.slot] = len(start.output_ids)
        self._params[start.slot] = start.params

    def _script(self, prompt_ids: tuple[int, ...]) -> list[int]:
        if self.script is not None:
            return self.script(prompt_ids)
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        text = prompt.rpartition("SAY:")[2].partition("|")[0] if "SAY:" in prompt else COUNT
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.eos_id]

    def _logits(self, slot: int) -> torch.Tensor:
        script, index = self._scripts[slot], self._num_output[slot]
        logits = noise(index, self.vocab_size).clone()
        logits[script[min(index, len(script) - 1)]] = self.peak
        return logits

    def _prompt_logprobs(self, row: Row) -> tuple[TokenLogprob, ...]:
        if not row.prompt_targets:
            return ()
        num = len(row.prompt_targets)
        logits = torch.stack([noise(row.start + i, self.vocab_size) for i in range(num)])
        num_top = self._params[row.slot].prompt_logprobs or 0
        return tuple(prompt_logprobs(logits, torch.tensor(row.prompt_targets), num_top))


@lru_cache(4096)
def noise(index: int, vocab_size: int) -> torch.Tensor:
    """`[vocab_size]` fixed logits within 0..3 for one position."""
    seed = int.from_bytes(hashlib.blake2b(b"%d" % index, digest_size=4).digest(), "little")
    return torch.from_numpy(np.random.default_rng(seed).random(vocab_size, dtype=np.float32) * 3)
