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
        max_num_queued_reqs, max_num_queued_tokens: bounds of what waits beyond the free slots (prompt tokens); None is
            unbounded, and 0 requests takes only what finds a free slot.
        prefix_pin_share: share of the pool that blocks of requests with a pin key may be kept in; 0 pins nothing.
        forecast_admission: let in only what should fit together with what the running sequences may still generate.
        max_preemptions: a sequence that lost its blocks so often comes back only when all it may need fits.
        decode_stretch: beside streams, a step with prompt tokens may take about so many times as long as without; see
            `scheduler.pace`. None for no limit.
        max_steps_in_flight: 1 plans a step when the one before is done; 2 already while it runs.
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
    prefix_pin_share: float = 0.0
    forecast_admission: bool = True
    max_preemptions: int = 3
    decode_stretch: float | None = None
    max_steps_in_flight: int = 1
    max_engine_failures: int = 3
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "max_engine_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, lowest in (("max_num_queued_reqs", 0), ("max_num_queued_tokens", 1), ("max_preemptions", 0)):
            limit = getattr(self, name)
            if limit is not None and limit < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {limit}")
        if self.max_steps_in_flight not in (1, 2):
            raise ValueError(f"max_steps_in_flight must be 1 or 2, got {self.max_steps_in_flight}")
        if self.decode_stretch is not None and self.decode_stretch < 1.0:
            raise ValueError(f"decode_stretch must be at least 1, got {self.decode_stretch}")
        if not 0.0 <= self.prefix_pin_share <= 1.0:
            raise ValueError(f"prefix_pin_share must be within 0..1, got {self.prefix_pin_share}")
