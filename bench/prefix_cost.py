"""What looking for shared prefixes costs where there are none: the same requests with the cache and without.

Two schedulers take turns on one engine, in many short rounds; a round of each is a pair, and the median of the pairs'
ratios counts. Two rounds fill the pool, so that each evicts what earlier ones left. With a model that computes nothing
the same rounds tell, in processor time, what the cache costs the host: too little to be seen beside a model on a busy
machine.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from bench.noop import BLOCK_SIZE, NoOpEngine
from bench.processes import ServerFailed
from bench.workloads import Prose, Question, fixed
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from kvpool.prefix import namespace_root
from kvpool.table import blocks_for
from scheduler.request import Request
from server.build import Loaded, assemble, load
from server.config import read_config
from server.state import Served
from server.text.replies import spell

Clock = Callable[[], float]
BAR = 1.01
HEAD = ("model", "pairs", "without s", "with s", "with / without", "95 %", "tokens", "cost per token us", "bar")


@dataclass(frozen=True, slots=True)
class Questions:
    """`num` questions a round, each of its own."""

    prose: Prose
    num: int
    num_in: int
    num_out: int

    def of_round(self, number: int) -> list[Question]:
        """The same for the same number."""
        return fixed(self.num_in, self.num_out).questions(self.prose, self.num, f"cost/{number}")

    @property
    def num_blocks(self) -> int:
        """A pool for two rounds."""
        return 2 * self.num * blocks_for(self.num_in + self.num_out, BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of rounds without and with the cache, pair by pair; `num_tokens` in and out of each round."""

    without_s: tuple[float, ...]
    with_s: tuple[float, ...]
    num_tokens: int

    @property
    def ratios(self) -> list[float]:
        """With over without, smallest first."""
        return sorted(w / wo for w, wo in zip(self.with_s, self.without_s, strict=True))

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def token_us(self) -> float:
        """Microseconds per token that the cache costs: median of the pairs' differences."""
        differences = [w - wo for w, wo in zip(self.with_s, self.without_s, strict=True)]
        return 1e6 * statistics.median(differences) / self.num_tokens


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95 %: order statistics, about 0.98 sqrt(n) from the middle; no assumptions."""
    reach = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, int(middle - reach))], ordered[min(len(ordered) - 1, int(middle + reach + 1))]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A scheduler with or without the cache, and what the server does to a prompt before it."""

    served: Served
    namespace: bytes = field(default_factory=lambda: namespace_root("bench"))

    async def round_s(self, questions: Sequence[Question], clock: Clock) -> float:
        """Answer all at once; seconds."""
        began_s = clock()
        await asyncio.gather(*(self._answer(question) for question in questions))
        return clock() - began_s

    async def _answer(self, question: Question) -> None:
        served, prompt_ids = self.served, question.prompt_ids
        if served.replies is not None:
            prompt_ids = served.replies.recall(spell(served.tokenizer, self.namespace, prompt_ids)).token_ids
        sampling = SamplingParams(temperature=0.0)
        handle = served.scheduler.submit(
            Request("r", prompt_ids, sampling, question.num_out, cache_namespace=self.namespace)
        )
        async for _ in handle:
            pass
        if handle.num_cached_tokens:
            raise ServerFailed("a prompt that was to share nothing was found in the cache")


async def measure_cost(loaded: Loaded, questions: Questions, pairs: int, clock: Clock) -> Cost:
    """Rounds in the order without, with, with, without, ...; the first pair is a warm-up. Raises ServerFailed."""
    flags = ["--enable-prefix-caching", "--no-enable-prefix-caching"]
    sides = [Side(assemble(loaded, read_config([flag], {}))) for flag in flags]
    running = [asyncio.create_task(side.served.scheduler.run()) for side in sides]
    times: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        asked = questions.of_round(number)
        order = sides if number % 2 else sides[::-1]
        took = {side: await side.round_s(asked, clock) for side in order}
        times.append((took[sides[1]], took[sides[0]]))
    for side in sides:
        side.served.scheduler.stop()
    await asyncio.gather(*running)
    without_s, with_s = zip(*times[1:], strict=True)
    return Cost(without_s, with_s, sum(len(q.prompt_ids) + q.num_out for q in asked))


def rows(model: str, questions: Questions, pairs: int) -> list[list[str]]:
    """Load the model, and measure with it and with none."""
    flags = ["--num-kv-blocks", str(questions.num_blocks), "--max-num-seqs", str(questions.num)]
    loaded = load(read_config([model, *flags], {}), lambda phase, fraction: None)
    try:
        real = asyncio.run(measure_cost(loaded, questions, pairs, time.perf_counter))
        host = asyncio.run(measure_cost(without_model(loaded), questions, 4 * pairs, time.process_time))
    finally:
        loaded.engine.close()
    share = host.token_us * host.num_tokens / (1e6 * statistics.median(real.without_s))
    verdict = f"{BAR - 1:.0%} {'met' if real.ratio <= BAR else 'missed'}"
    return [
        cells(Path(model).stem, real, verdict),
        cells("none, CPU time", host, f"{share:.2%} of the model's"),
    ]


def without_model(loaded: Loaded) -> Loaded:
    """The same, with an engine that computes nothing."""
    info = loaded.engine.info
    engine = NoOpEngine(range(100, 200), info.num_blocks, info.vocab_size, hops=False)
    return replace(loaded, engine=cast(Engine, engine))


def cells(name: str, cost: Cost, verdict: str) -> list[str]:
    """A row of the table."""
    low, high = median_interval(cost.ratios)
    medians = [f"{statistics.median(times_s):.4f}" for times_s in (cost.without_s, cost.with_s)]
    ratios = [f"{cost.ratio:.4f}", f"{low:.3f} .. {high:.3f}"]
    return [name, str(len(cost.ratios)), *medians, *ratios, str(cost.num_tokens), f"{cost.token_us:.2f}", verdict]
