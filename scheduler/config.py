"""The scheduler's settings: read once, never written."""

from dataclasses import dataclass
from enum import StrEnum


class SchedulingPolicy(StrEnum):
    """In which order waiting requests are admitted, and (backwards) running ones preempted."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    Attributes:
        max_num_seqs: running sequences at once; also the number of engine slots.
        max_num_batched_tokens: token budget of one step.
        max_model_len: prompt plus output tokens of one sequence.
        block_size: tokens per KV block.
        max_num_queued_reqs, max_num_queued_tokens: bounds of the waiting queue (prompt tokens); None is unbounded.
        max_engine_failures: consecutive failed steps after which the loop turns unhealthy.
        check_invariants: run the pool's and the scheduler's checks whenever idle.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    block_size: int = 16
    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = None
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_prefix_caching: bool = True
    max_engine_failures: int = 3
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "max_engine_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1 (or None for no bound), got {limit}")
