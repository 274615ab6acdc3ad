"""How much KV memory holds no token: paged blocks beside one contiguous reservation for each conversation.

A realistic mix of lengths arrives at random times and is served by the real scheduler over an engine that only keeps
time, until the pool is under pressure. At every step, three ways of holding the same sequences are compared:

    paged           this engine: blocks of 16 tokens; wasted is the free end of each last block
    reserved        contiguous memory for prompt and max_tokens, taken when a conversation begins
    whole context   contiguous memory for the model's whole context, as engines without paging do it

Wasted is what a way holds beyond the tokens computed or about to be, as a share of all that it holds, averaged over
time. The published figure for contiguous reservation is 60 to 80 % (Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention"). `python bench/kv_waste.py`; no model is needed.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.batch import Batch, RowOutput, StepOutput
from engine.sampling.params import SamplingParams
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.kv_report import unused_slots
from scheduler.loop import Scheduler
from scheduler.observer import NullObserver, StepReport
from scheduler.request import Request

CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of conversation: median lengths, the spread of their logarithms, and its share of all requests."""

    name: str
    num_prompt: int
    num_answer: int
    max_tokens: int
    share: float
    spread: float = 0.8


MIX = (
    Kind("chat, first turn", 120, 180, 1024, 0.35),
    Kind("chat, later turns", 900, 220, 1024, 0.35),
    Kind("summary", 2200, 160, 512, 0.12),
    Kind("code", 700, 420, 2048, 0.13),
    Kind("classification", 350, 6, 16, 0.05, spread=0.4),
)


@dataclass
class Totals:
    """Sums over steps, in tokens."""

    used: int = 0
    paged: int = 0
    reserved: int = 0
    whole: int = 0

    def add(self, used: int, paged: int, reserved: int, whole: int) -> None:
        """One step."""
        self.used += used
        self.paged += paged
        self.reserved += reserved
        self.whole += whole


@dataclass
class Watcher(NullObserver):
    """Adds up, after each step, what the running sequences hold and what they use."""

    totals: Totals = field(default_factory=Totals)
    scheduler: Scheduler | None = None
    num_steps: int = 0

    def on_step(self, report: StepReport) -> None:
        """Look."""
        assert self.scheduler is not None
        running = self.scheduler._roster.running
        num_slots = self.scheduler.stats().pool.num_referenced * running.block_size
        reserved = sum(s.num_prompt + s.request.max_tokens for s in running.sequences)
        used = num_slots - unused_slots(running.sequences)
        self.totals.add(used, num_slots, reserved, len(running.sequences) * CONTEXT)
        self.num_steps += 1


class TimeKeeper:
    """An engine without a model: every row that samples gets a token; an answer ends after its planned length."""

    async def step(self, batch: Batch) -> StepOutput:
        """Answer at once, so that time is counted in steps."""
        await asyncio.sleep(0)
        rows = tuple(RowOutput(token_ids=(1,)) if row.sample else RowOutput() for row in batch.rows)
        return StepOutput(batch.step, rows, 0.0)


def main() -> None:
    """Run and print."""
    args = parse_args()
    watcher = asyncio.run(serve(args))
    print(report(args, watcher))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pool-tokens", type=int, default=65_536, help="what the KV pool holds")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def requests(count: int, seed: int) -> Iterator[tuple[Request, int]]:
    """Requests of the mix, with the length that each answer will have. No two prompts begin alike."""
    rng = random.Random(seed)
    for number in range(count):
        kind = rng.choices(MIX, [each.share for each in MIX])[0]
        num_prompt = clipped(rng.lognormvariate(math.log(kind.num_prompt), kind.spread), CONTEXT - kind.max_tokens)
        num_answer = clipped(rng.lognormvariate(math.log(kind.num_answer), kind.spread), kind.max_tokens)
        prompt_ids = (10 + number, *([2] * (num_prompt - 1)))
        yield Request(f"r{number}", prompt_ids, SamplingParams(), kind.max_tokens), num_answer


def clipped(length: float, limit: int) -> int:
    """A whole length within 1..limit."""
    return max(1, min(limit, round(length)))


async def serve(args: argparse.Namespace) -> Watcher:
    """Serve all requests as fast as the pool lets them in."""
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=4096,
        max_model_len=CONTEXT,
        block_size=args.block_size,
        max_num_queued_reqs=None,
    )
    watcher = Watcher()
    scheduler = Scheduler(TimeKeeper(), BlockPool(args.pool_tokens // args.block_size), config, observer=watcher)
    watcher.scheduler = scheduler
    loop = asyncio.create_task(scheduler.run())
    await asyncio.gather(
        *(answer(scheduler, request, length) for request, length in requests(args.requests, args.seed))
    )
    scheduler.drain()
    await loop
    return watcher


async def answer(scheduler: Scheduler, request: Request, num_answer: int) -> None:
    """Read one answer and end it where its model would have."""
    handle, num_tokens = scheduler.submit(request), 0
    async for events in handle:
        num_tokens += sum(len(event.token_ids) for event in events)
        if num_tokens >= num_answer and not handle.is_done:
            handle.finish(0)


def report(args: argparse.Namespace, watcher: Watcher) -> str:
    """The table and what it was measured on."""
    totals = watcher.totals
    rows = (
        (f"paged, blocks of {args.block_size}", totals.paged),
        ("reserved: prompt and max_tokens", totals.reserved),
        (f"whole context of {CONTEXT:,}", totals.whole),
    )
    lines = [
        f"{args.requests:,} requests, seed {args.seed}, a pool of {args.pool_tokens:,} tokens, at most "
        f"{args.max_num_seqs} at once; {watcher.num_steps:,} steps, on average {totals.used / watcher.num_steps:,.0f} "
        "tokens in use.",
        "",
        "| KV memory | tokens held, mean | wasted | times the memory |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, held in rows:
        waste = 1 - totals.used / held
        lines.append(f"| {name} | {held / watcher.num_steps:,.0f} | {waste:.2%} | {held / totals.paged:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
