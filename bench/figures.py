"""From one run's requests to its figures, and from several runs to their medians. Pure arithmetic.

sent ............ first content . gap . gap . gap .. ended
|----- TTFT -----|                                  |
|                |-------- (output tokens - 1) x TPOT --------|
|------------------- end to end ---------------------|
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its client saw it. Moments are seconds on one clock of the client.

    Attributes:
        due_s: when it was to be sent; waiting for the generator counts against the server it measures.
        first_s: the first content; None when none came.
        gaps_s: between one event with content and the next.
        ended_s: the end of the stream.
        num_prompt_tokens, num_output_tokens: by the server's own `usage`.
        error: why it has no figures; None for a good answer.
    """

    due_s: float
    ended_s: float
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Sending to first content; NaN when none came."""
        return math.nan if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN with fewer than two."""
        if self.first_s is None or self.num_output_tokens < 2:
            return math.nan
        return (self.ended_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def end_to_end_s(self) -> float:
        """Sending to the end of the stream."""
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server.

    `generator_cpu_s` is what the load generator itself computed meanwhile, on the same machine. `wall_s` is given
    where no client saw the requests one by one (offline); else it follows from the records.
    """

    records: tuple[Record, ...]
    generator_cpu_s: float = 0.0
    given_wall_s: float | None = None

    @property
    def wall_s(self) -> float:
        """First request due to last one ended."""
        if self.given_wall_s is not None:
            return self.given_wall_s
        return max(record.ended_s for record in self.records) - min(record.due_s for record in self.records)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer must keep, both: seconds to the first content, and seconds per token after it."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def holds(self, record: Record) -> bool:
        """A failed request meets nothing; one with a single token has no TPOT to miss."""
        if record.error is not None or not record.ttft_s <= self.ttft_s:
            return False
        return math.isnan(record.tpot_s) or record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one quantity; NaN without a sample."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run says. Rates are per second of wall time; times are in seconds.

    `goodput_per_s` counts requests that meet the SLO, `goodput_share` is their share of all that were sent.
    """

    num_requests: float
    num_failed: float
    num_prompt_tokens: float
    num_output_tokens: float
    num_cached_tokens: float
    wall_s: float
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    goodput_share: float
    generator_cpu_share: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    end_to_end: Spread


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the others lie, interpolated linearly; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> Spread:
    """p50, p95 and p99 of the values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return Spread(percentile(known, 0.50), percentile(known, 0.95), percentile(known, 0.99))


def figures_of(run: Run, slo: Slo) -> Figures:
    """The figures of one run. Failed requests count as sent, and for nothing else."""
    good = [record for record in run.records if record.error is None]
    wall_s = run.wall_s
    num_output_tokens = sum(record.num_output_tokens for record in good)
    num_meeting = sum(map(slo.holds, run.records))
    return Figures(
        num_requests=len(run.records),
        num_failed=len(run.records) - len(good),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in good),
        num_output_tokens=num_output_tokens,
        num_cached_tokens=sum(record.num_cached_tokens for record in good),
        wall_s=wall_s,
        output_tokens_per_s=num_output_tokens / wall_s,
        requests_per_s=len(good) / wall_s,
        goodput_per_s=num_meeting / wall_s,
        goodput_share=num_meeting / len(run.records),
        generator_cpu_share=run.generator_cpu_s / wall_s,
        ttft=spread([record.ttft_s for record in good]),
        itl=spread([gap for record in good for gap in record.gaps_s]),
        tpot=spread([record.tpot_s for record in good]),
        end_to_end=spread([record.end_to_end_s for record in good]),
    )


def median_of(repeats: Sequence[Figures]) -> Figures:
    """Each figure's own median over the repeats."""
    values = {field.name: [getattr(one, field.name) for one in repeats] for field in fields(Figures)}
    return Figures(**{name: _median(several) for name, several in values.items()})


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Spread):
        return Spread(*(_median([getattr(one, name) for one in values]) for name in ("p50", "p95", "p99")))
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def knee(throughput_by_users: Sequence[tuple[int, float]], share: float = 0.8) -> int:
    """The fewest users that reach `share` of the highest throughput: beyond, users wait more and little is gained."""
    best = max(rate for _, rate in throughput_by_users)
    return min(users for users, rate in throughput_by_users if rate >= share * best)
