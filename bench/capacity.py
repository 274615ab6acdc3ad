"""What `POST /v1/capacity` predicts beside what then happens, in real time, on a server under a steady load.

A number of users each ask again as soon as they are answered. From time to time one more request is foreseen and then
sent; its queue wait, TTFT and finish are compared. Lengths of the users' answers are not known beforehand, as in life:
they end at random, and who comes later is only known from how many came of late. Prints one Markdown table.
`python -m bench.capacity`, or with `--users 12 --probes 20 --model FOLDER`.
"""

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Sequence

from bench.machine import processor
from engine.sampling.params import SamplingParams
from scheduler.forecast import SPAN_S
from scheduler.loop import Scheduler
from scheduler.predict import Prediction, predict
from scheduler.request import Request
from server.config import ServerConfig
from server.openmp import tame_thread_barriers

NAMES = ("queue_wait_s", "ttft_s", "finish_s")


def main() -> None:
    """Measure and print."""
    args = parse_args()
    tame_thread_barriers(os.environ)
    from server.build import assemble, load  # imports torch, whose threads are to be tame by then

    config = ServerConfig(model=args.model, dtype=args.dtype, max_num_seqs=args.slots, reply_memory=0)
    loaded = load(config, lambda phase, fraction: None)

    async def run() -> list[tuple[Prediction, Prediction]]:
        served = assemble(loaded, config)
        serving = asyncio.create_task(served.scheduler.run())
        pairs = await measure(served.scheduler, args)
        served.scheduler.stop()
        await serving
        return pairs

    try:
        pairs = asyncio.run(run())
    finally:
        loaded.engine.close()
    print(report(args, pairs))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4, help="sequences that run at once")
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--num-in", type=int, default=96)
    parser.add_argument("--num-out", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def measure(scheduler: Scheduler, args: argparse.Namespace) -> list[tuple[Prediction, Prediction]]:
    """Pairs of what was predicted and what happened, after it has been seen for a while how often users ask."""
    rng = random.Random(args.seed)
    users = [asyncio.create_task(user(scheduler, random.Random(f"{args.seed}-{n}"), args)) for n in range(args.users)]
    await asyncio.gather(probe(scheduler, rng, args), asyncio.sleep(2 * SPAN_S))
    pairs = []
    for _ in range(args.probes):
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        pairs.append(await probe(scheduler, rng, args))
    for task in users:
        task.cancel()
    return pairs


async def user(scheduler: Scheduler, rng: random.Random, args: argparse.Namespace) -> None:
    """Ask again and again; answers end anywhere up to `num_out` tokens."""
    while True:
        wanted, num_tokens = rng.randint(args.num_out // 4, args.num_out), 0
        handle = scheduler.submit(request(rng, args))
        async for events in handle:
            num_tokens += sum(len(event.token_ids) for event in events)
            if num_tokens >= wanted and not handle.is_done:
                handle.finish(0)


async def probe(scheduler: Scheduler, rng: random.Random, args: argparse.Namespace) -> tuple[Prediction, Prediction]:
    """Foresee one request, then send it."""
    asked = request(rng, args)
    question = scheduler.foresee(asked)
    predicted = predict(question.outlook, question.load) or Prediction(0.0, 0.0, 0.0)
    handle = scheduler.submit(asked)
    async for _ in handle:
        pass
    times = handle.times
    moments = (times.scheduled_s, times.first_token_s, times.finished_s)
    return predicted, Prediction(*((moment or times.arrived_s) - times.arrived_s for moment in moments))


def request(rng: random.Random, args: argparse.Namespace) -> Request:
    """A prompt of ordinary words that shares no beginning with another."""
    prompt_ids = tuple(rng.randrange(1000, 40000) for _ in range(args.num_in))
    return Request(f"r{rng.random()}", prompt_ids, SamplingParams(temperature=0.0), args.num_out)


def report(args: argparse.Namespace, pairs: Sequence[tuple[Prediction, Prediction]]) -> str:
    """The table and what it was measured on."""
    lines = [
        f"{processor()}; {args.dtype}; {args.users} users on {args.slots} slots, {args.num_in} tokens in, answers of "
        f"{args.num_out // 4}..{args.num_out}; {len(pairs)} probes of {args.num_out} tokens.",
        "",
        "| | predicted, median s | happened, median s | error, median | error, worst |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in NAMES:
        values = [(getattr(predicted, name), getattr(happened, name)) for predicted, happened in pairs]
        errors = [abs(guess - fact) / max(fact, 0.05) for guess, fact in values]
        guessed, was = (statistics.median(column) for column in zip(*values, strict=True))
        lines.append(f"| {name} | {guessed:.2f} | {was:.2f} | {statistics.median(errors):.0%} | {max(errors):.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
