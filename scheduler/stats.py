"""A snapshot of the scheduler for health checks, metrics and operators."""

from dataclasses import dataclass

from kvpool.pool import PoolStats
from kvpool.tier import TierStats


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What is going on right now.

    Attributes:
        num_running, num_waiting: sequences.
        num_waiting_tokens: prompt tokens of requests that no step has touched yet.
        drain_tokens_per_s: measured rate at which tokens are computed; 0 before the first step.
        step_running_s: how long the step in flight has been running; None when idle.
        unhealthy: why the engine is considered dead; None when it is not.
        tiers: where evicted blocks live on, fastest first; empty when there is none.
        num_pinned_blocks: blocks that keys keep in the pool.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    drain_tokens_per_s: float
    step_running_s: float | None
    is_draining: bool
    unhealthy: str | None
    pool: PoolStats
    tiers: tuple[TierStats, ...] = ()
    num_pinned_blocks: int = 0
