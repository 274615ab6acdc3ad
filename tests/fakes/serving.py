"""The real scheduler over the real engine, without a server; and what transformers answers instead."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.engine import Engine
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from scheduler.offload import Backing
from scheduler.request import FinishReason, Request

MAX_NUM_SEQS = 16


@dataclass(frozen=True)
class Answer:
    """One choice's tokens, and its request's handle."""

    token_ids: list[int]
    handle: RequestHandle


def serve(
    engine: Engine,
    *waves: Sequence[Request],
    num_blocks: int | None = None,
    max_num_batched_tokens: int = 512,
    backing: Backing | None = None,
    forecast_admission: bool = True,
) -> list[list[list[Answer]]]:
    """Run waves of requests one after the other; per wave, per request, per choice: its answer."""
    config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=engine.info.max_model_len,
        block_size=engine.info.layout.block_size,
        check_invariants=True,
        forecast_admission=forecast_admission,
    )
    pool = BlockPool(num_blocks or engine.info.num_blocks)
    return asyncio.run(_serve(engine, waves, pool, config, backing))


async def _serve(
    engine: Engine,
    waves: Sequence[Sequence[Request]],
    pool: BlockPool,
    config: SchedulerConfig,
    backing: Backing | None,
) -> list[list[list[Answer]]]:
    scheduler = Scheduler(engine, pool, config, backing=backing)
    loop = asyncio.create_task(scheduler.run())
    answers = []
    for wave in waves:
        handles = [scheduler.submit(request) for request in wave]
        answers.append(await asyncio.gather(*(_collect(handle) for handle in handles)))
    scheduler.drain()
    await loop
    scheduler.check()
    assert pool.stats().num_referenced == 0
    return answers


async def _collect(handle: RequestHandle) -> list[Answer]:
    tokens: list[list[int]] = [[] for _ in range(handle.request.num_choices)]
    async for events in handle:
        for event in events:
            assert event.finish_reason in (None, FinishReason.LENGTH), event.error
            tokens[event.choice] += event.token_ids
    return [Answer(token_ids, handle) for token_ids in tokens]


def reference_greedy(reference: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers continues `prompt` with, and proof that no token was a coin toss: rounding must not decide."""
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        temperature=None,
        top_k=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3, "a tie between two tokens: choose another prompt or seed"
    return out.sequences[0, len(prompt) :].tolist()
