"""What is let in, and when to come back: decided once, at `submit`, before anything is queued.

Knows limits, the queue's counts and how fast work drains; never waits and never evicts.
"""

import math

from kvpool.table import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.errors import ContextTooLong, NeverFits, QueueFull
from scheduler.observer import NullObserver, RequestReport, StepReport
from scheduler.queue import WaitingQueue
from scheduler.request import Request

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Clients obey a Retry-After within these bounds."""


class DrainMeter(NullObserver):
    """How fast the engine works and how long answers are: exponentially weighted means, recent ones first.

    `memory_s` of work, and `memory_requests` answers, are how far back the means look.
    """

    def __init__(self, memory_s: float = 10.0, memory_requests: float = 50.0) -> None:
        self._memory_s = memory_s
        self._memory_requests = memory_requests
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._num_output_tokens = 0.0
        self._num_requests = 0.0

    def on_step(self, report: StepReport) -> None:
        """Count the tokens of a step, and the time from its plan to its commit."""
        duration_s = report.plan_s + report.engine_s + report.commit_s
        kept = math.exp(-duration_s / self._memory_s)
        self._num_tokens = self._num_tokens * kept + report.num_prefill_tokens + report.num_decode_tokens
        self._busy_s = self._busy_s * kept + duration_s

    def on_request_end(self, report: RequestReport) -> None:
        """Count the output tokens of an answer, over all its choices."""
        kept = 1.0 - 1.0 / self._memory_requests
        self._num_output_tokens = self._num_output_tokens * kept + report.num_output_tokens
        self._num_requests = self._num_requests * kept + 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second of work, prompts and outputs alike; 0 before the first step."""
        return self._num_tokens / self._busy_s if self._busy_s > 0 else 0.0

    @property
    def tokens_per_answer(self) -> float:
        """Mean output tokens of a request; 0 before the first has ended."""
        return self._num_output_tokens / self._num_requests if self._num_requests else 0.0

    def retry_after_s(self, num_requests: int, num_prompt_tokens: int) -> float:
        """When the work ahead in the queue (these prompts, and answers of mean length) should be done."""
        work = num_prompt_tokens + num_requests * self.tokens_per_answer
        eta_s = work / self.tokens_per_s if self.tokens_per_s else MIN_RETRY_S
        return min(max(eta_s, MIN_RETRY_S), MAX_RETRY_S)


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

    def check_queue(self, request: Request, queue: WaitingQueue, num_free_slots: int, meter: DrainMeter) -> None:
        """Refuse what the bounded queue has no place for now. Who finds a free slot does not queue.

        An empty queue takes a request of any length.

        Raises:
            QueueFull: with the time after which to try again.
        """
        max_requests, max_tokens = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if len(queue) < num_free_slots or (max_tokens is None and _is_below(queue.num_new_requests, max_requests)):
            return
        num_requests, num_tokens = queue.excess(num_free_slots)
        if not _is_below(num_requests, max_requests):
            raise QueueFull("requests", num_requests, max_requests or 0, meter.retry_after_s(num_requests, num_tokens))
        if num_tokens and not _is_below(num_tokens + len(request.prompt_ids) - 1, max_tokens):
            raise QueueFull("tokens", num_tokens, max_tokens or 0, meter.retry_after_s(num_requests, num_tokens))


def _is_below(number: int, limit: int | None) -> bool:
    return limit is None or number < limit
