"""The scheduler's errors, split by whose fault they are. The server maps each to a status in one table.

SchedulerError
|-- RequestRefused         before anything was queued
|   |-- ContextTooLong         400  prompt (+ what was asked for) exceeds the model's context
|   |-- NeverFits              400  the pool could not hold it even when empty
|   |-- QueueFull              429  bounded queue; carries a computed retry_after_s
|   |-- Draining               503  shutting down
|   `-- Unhealthy              503  the engine is dead or stuck
`-- RequestFailed          after it was accepted
    `-- EngineFailed           500  the engine failed while it ran
"""


class SchedulerError(Exception):
    """Base of everything the scheduler raises on purpose."""


class RequestRefused(SchedulerError):
    """The request was not queued."""


class ContextTooLong(RequestRefused):
    """The prompt leaves no room in the model's context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has "
            f"{num_prompt_tokens} prompt tokens and asks for at least {max_tokens} more."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class NeverFits(RequestRefused):
    """The KV pool could not hold the request even when empty."""

    def __init__(self, num_tokens: int, pool_tokens: int) -> None:
        super().__init__(
            f"This server's maximum context length is {pool_tokens} tokens of KV cache. However, your request may need "
            f"{num_tokens} tokens (prompt plus max_tokens)."
        )
        self.num_tokens = num_tokens
        self.pool_tokens = pool_tokens


class QueueFull(RequestRefused):
    """The bounded queue is full. `retry_after_s`: when all that waits in it should have begun, at the measured pace."""

    def __init__(self, reason: str, queue_depth: int, limit: int, retry_after_s: float) -> None:
        super().__init__(f"The queue is full ({reason}: {queue_depth} of {limit}); retry in {retry_after_s:.1f} s.")
        self.reason = reason
        self.queue_depth = queue_depth
        self.limit = limit
        self.retry_after_s = retry_after_s


class Draining(RequestRefused):
    """The server finishes what it has and takes nothing new."""


class Unhealthy(RequestRefused):
    """The engine is dead or stuck; the message says why."""


class RequestFailed(SchedulerError):
    """An accepted request could not be completed."""


class EngineFailed(RequestFailed):
    """The engine failed while the request ran."""
