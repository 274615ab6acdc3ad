"""From the scheduler's state to the frozen picture that `predict` and `turn` look forward from. Read-only.

Knows sequences, tables and the prefix index; changes none of them.
"""

import math
from dataclasses import dataclass
from itertools import chain

from kvpool.pool import BlockPool
from kvpool.prefix import extend_chain
from kvpool.table import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.forecast import ArrivalMeter, LengthForecast
from scheduler.pace import PaceMeter
from scheduler.predict import Arrivals, Load, Outlook, StepClock
from scheduler.request import Request
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceState
from scheduler.turn import turn_s

GOLDEN = (math.sqrt(5) - 1) / 2
NUM_TYPICAL = 8
"""How many requests stand for all that may come."""


@dataclass(frozen=True, slots=True)
class Question:
    """What `Scheduler.foresee` answers: the moment, the request as a load, and what the prefix cache has of it.

    `num_concurrent` is how many such requests, each with a prompt of its own, run at once when nothing else does.
    """

    outlook: Outlook
    load: Load
    num_cached_tokens: int
    num_concurrent: int


@dataclass(frozen=True, slots=True)
class Meters:
    """What was learned of lengths, arrivals and steps."""

    forecast: LengthForecast
    arrivals: ArrivalMeter
    pace: PaceMeter


class Foresight:
    """Takes pictures of one scheduler."""

    def __init__(self, roster: Roster, pool: BlockPool, config: SchedulerConfig, meters: Meters) -> None:
        self.step_clock = StepClock()
        self._roster = roster
        self._pool = pool
        self._config = config
        self._forecast = meters.forecast
        self._arrivals = meters.arrivals
        self._pace = meters.pace

    def question(self, request: Request, now_s: float, step_running_s: float | None) -> Question:
        """The picture of now; `step_running_s` is how long the step in flight has run, None when none is."""
        load, num_cached = self._load_of(request)
        num_tokens = len(request.prompt_ids) + max(0, request.max_tokens - 1)
        num_blocks = blocks_for(num_tokens, self._config.block_size)
        num_concurrent = min(self._config.max_num_seqs, self._pool.num_blocks // num_blocks)
        return Question(self._outlook(now_s, step_running_s), load, num_cached, num_concurrent)

    def turn_s(self, now_s: float, step_running_s: float | None) -> float | None:
        """Roughly when a request behind all that wait would begin, in seconds from now. None before the first step."""
        return turn_s(self._outlook(now_s, step_running_s))

    def _outlook(self, now_s: float, step_running_s: float | None) -> Outlook:
        size, running = self._config.block_size, self._roster.running
        sequences = [s for s in running.sequences if s.state is SequenceState.RUNNING]
        own = {s: running.num_own_blocks(s) for s in sequences}
        groups = self._roster.groups.values()
        held = sorted((s for group in groups for s in group.held()), key=lambda s: s.order)
        times = self.step_clock.times
        left_s = 0.0 if step_running_s is None or times is None else max(0.0, times.mean_s - step_running_s)
        return Outlook(
            running=tuple(self._running(s, num_own, _share(i)) for i, (s, num_own) in enumerate(own.items())),
            waiting=tuple(self._waiting(s, _share(i)) for i, s in enumerate(chain(self._roster.queue, held))),
            num_slots=self._config.max_num_seqs,
            num_step_tokens=self._config.max_num_batched_tokens,
            num_beside_streams=None if self._pace.pace is None else self._pace.pace.num_prompt_tokens,
            num_pool_tokens=(self._pool.num_spare + sum(own.values())) * size,
            times=times,
            step_left_s=left_s,
            arrivals=self._newcomers(now_s),
        )

    def _newcomers(self, now_s: float) -> Arrivals | None:
        """Requests like those of late, as often as of late."""
        interval_s = self._arrivals.interval_s(now_s)
        if interval_s is None:
            return None
        num_tokens, expected = self._arrivals.num_tokens, self._forecast.expected
        loads = (self._load(num_tokens, num_tokens, expected(0, _share(i))) for i in range(NUM_TYPICAL))
        return Arrivals(interval_s, tuple(loads))

    def _running(self, sequence: Sequence, num_own: int, share: float) -> Load:
        """A sequence that runs, without the blocks that it shares."""
        num_shared = (len(sequence.table.block_ids) - num_own) * self._config.block_size
        return self._load(len(sequence.tokens) - num_shared, sequence.gap, self._forecast.growth(sequence, share))

    def _waiting(self, sequence: Sequence, share: float) -> Load:
        """A sequence that does not run. A further choice forks its prompt from the first one."""
        num_tokens = 1 if sequence.state is SequenceState.HELD else len(sequence.tokens)
        return self._load(num_tokens, num_tokens, self._forecast.growth(sequence, share))

    def _load(self, num_held: int, num_gap: int, num_output: int) -> Load:
        """Half of a last block is counted as held, as it will be on average; so does the scheduler itself."""
        return Load(num_held + self._config.block_size // 2, num_gap, num_output)

    def _load_of(self, request: Request) -> tuple[Load, int]:
        """A request that is not queued, and how many tokens of it the prefix cache has."""
        num_prompt, size = len(request.prompt_ids), self._config.block_size
        block_ids: list[int] = []
        if self._config.enable_prefix_caching and request.use_prefix_cache:
            digests: list[bytes] = []
            extend_chain(request.cache_namespace, digests, request.prompt_ids, size)
            block_ids = self._roster.running.prefix_index.match(digests)
        num_cached = min(len(block_ids) * size, num_prompt - 1)
        num_shared = sum(self._pool.ref_count(block_id) > 0 for block_id in block_ids)
        load = self._load(num_prompt - num_shared * size, num_prompt - num_cached, request.max_tokens)
        return load, num_cached


def _share(index: int) -> float:
    """Which quantile of answers' lengths the `index`-th of several is expected to have.

    All of typical length would end together; it is the first end of many that lets the next one in. So lengths are
    spread as they are in life, and evenly: multiples of the golden ratio, from the middle.
    """
    return (0.5 + index * GOLDEN) % 1.0
