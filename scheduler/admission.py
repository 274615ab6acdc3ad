"""What is let in, and when to come back: decided once, at `submit`, before anything is queued.

Knows limits and the queue's counts; never waits and never evicts. When to come back is when all that is ahead in the
queue should have begun: the queue has room again then, for as many as it holds and not only for the first of those
who were sent away, and the engine has not yet run out of work. It does not say when their answers would be done.
"""

import math
from collections.abc import Callable

from kvpool.table import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.errors import ContextTooLong, NeverFits, QueueFull
from scheduler.observer import NullObserver, StepReport
from scheduler.queue import WaitingQueue
from scheduler.request import Request

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Clients obey a Retry-After within these bounds."""


class DrainMeter(NullObserver):
    """How fast the engine works: an exponentially weighted mean over about the last `memory_s` of work."""

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._num_tokens = 0.0
        self._busy_s = 0.0

    def on_step(self, report: StepReport) -> None:
        """Count the tokens of a step, and the time from its plan to its commit."""
        duration_s = report.plan_s + report.engine_s + report.commit_s
        kept = math.exp(-duration_s / self._memory_s)
        self._num_tokens = self._num_tokens * kept + report.num_prefill_tokens + report.num_decode_tokens
        self._busy_s = self._busy_s * kept + duration_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second of work, prompts and outputs alike; 0 before the first step."""
        return self._num_tokens / self._busy_s if self._busy_s > 0 else 0.0


class Admission:
    """The limits of one scheduler."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self._config = config
        self._num_blocks = num_blocks

    def check_fits(self, request: Request) -> None:
        """Refuse at once what could never run.

        Raises:
            ContextTooLong: prompt plus output exceeds the context; a prompt that is only scored may fill it.
            NeverFits: one choice alone would need more blocks than the pool has.
        """
        num_prompt, config = len(request.prompt_ids), self._config
        if num_prompt + request.max_tokens > config.max_model_len:
            raise ContextTooLong(num_prompt, request.max_tokens, config.max_model_len)
        num_tokens = num_prompt + request.max_tokens
        if blocks_for(num_tokens, config.block_size) > self._num_blocks:
            raise NeverFits(num_tokens, self._num_blocks * config.block_size)

    def check_queue(
        self, request: Request, queue: WaitingQueue, num_free_slots: int, turn_s: Callable[[], float | None]
    ) -> None:
        """Refuse what the bounded queue has no place for now. Who finds a free slot does not queue.

        An empty queue takes a request of any length. `turn_s` says when a request behind all that wait would begin,
        None when nothing is known of that yet.

        Raises:
            QueueFull: with the time after which to try again.
        """
        max_requests, max_tokens = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if len(queue) < num_free_slots or (max_tokens is None and _is_below(queue.num_new_requests, max_requests)):
            return
        num_requests, num_tokens = queue.excess(num_free_slots)
        if not _is_below(num_requests, max_requests):
            raise QueueFull("requests", num_requests, max_requests or 0, _retry_after_s(turn_s()))
        if num_tokens and not _is_below(num_tokens + len(request.prompt_ids) - 1, max_tokens):
            raise QueueFull("tokens", num_tokens, max_tokens or 0, _retry_after_s(turn_s()))


def _is_below(number: int, limit: int | None) -> bool:
    return limit is None or number < limit


def _retry_after_s(turn_s: float | None) -> float:
    return min(max(turn_s or 0.0, MIN_RETRY_S), MAX_RETRY_S)
