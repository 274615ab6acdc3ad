"""What choosing tokens costs: milliseconds of processor time per step, by setting, rows and way of drawing.

    wide     normally distributed logits: thousands of tokens share the probability, as at a high temperature
    peaked   a power law over the ranks: a few tokens hold most of it, as in running text

Processor time, because other processes of the machine do not count in it; the median of some rounds, torch's operators
and the native kernel in turn, on as many threads as `--threads` says. The logits are copied anew for each step; that is
not counted. Prints one Markdown table a distribution. `python bench/sampling.py`, or `--vocab 151936 --rows 1 8 64`.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.batch import SlotStart
from engine.native import find_native
from engine.sampling.native_race import NativeRace
from engine.sampling.params import SamplingParams
from engine.sampling.race import Race, TorchRace
from engine.sampling.sampler import Sampler

SETTINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(top_k=50),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top-k 2000": SamplingParams(top_k=2000),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-p 0.5": SamplingParams(top_p=0.5),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "typical-p 0.9": SamplingParams(typical_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.2),
    "logprobs 5": SamplingParams(logprobs=5),
}
HISTORY = tuple(range(300, 556))
"""The prompt of every sequence: penalties look at its tokens."""


def main() -> None:
    """Measure and print."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    races = available_races()
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), vocabulary {args.vocab}; ms of processor time per step"
    )
    for name, logits in distributions(max(args.rows), args.vocab).items():
        print(f"\n{name}:\n")
        print(header(args.rows, list(races)))
        for setting, params in SETTINGS.items():
            cells = [
                f"{cost:.2f}"
                for num_rows in args.rows
                for cost in measure(params, logits[:num_rows], races, args.rounds)
            ]
            print("| " + " | ".join((setting, *cells)) + " |")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def available_races() -> dict[str, Race]:
    """By name; the native one where it can be built."""
    kernels = find_native()
    return {"torch": TorchRace()} | ({} if kernels is None else {"native": NativeRace(kernels)})


def distributions(num_rows: int, vocab: int) -> dict[str, torch.Tensor]:
    """Logits [num_rows, vocab] by name."""
    random = torch.Generator().manual_seed(0)
    power_law = -1.5 * torch.arange(1, vocab + 1).log()
    shuffled = [power_law[torch.randperm(vocab, generator=random)] for _ in range(num_rows)]
    return {"wide": torch.randn(num_rows, vocab, generator=random) * 2.0, "peaked": torch.stack(shuffled)}


def header(rows: list[int], races: list[str]) -> str:
    """The first two lines of a table."""
    columns = [f"{num} row{'s' * (num > 1)}, {race}" for num in rows for race in races]
    return "\n".join(("| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)))


def measure(params: SamplingParams, logits: torch.Tensor, races: Mapping[str, Race], rounds: int) -> list[float]:
    """The median cost of a step over `logits` [n, vocab] with each race, in ms; the first round is not counted."""
    samplers = [started(params, logits, race) for race in races.values()]
    costs: list[list[float]] = [[] for _ in samplers]
    for _ in range(rounds + 1):
        for sampler, times in zip(samplers, costs, strict=True):
            step_logits = logits.clone()
            start = time.process_time()
            sampler.sample(range(len(logits)), step_logits)
            times.append((time.process_time() - start) * 1e3)
    return [statistics.median(times[1:]) for times in costs]


def started(params: SamplingParams, logits: torch.Tensor, race: Race) -> Sampler:
    """A sampler with a sequence in each slot, each with a seed of its own."""
    num_rows, vocab = logits.shape
    sampler = Sampler(num_rows, vocab, logits.device, race=race)
    for slot in range(num_rows):
        sampler.start(SlotStart(slot, replace(params, seed=slot), 0, HISTORY))
    return sampler


if __name__ == "__main__":
    main()
