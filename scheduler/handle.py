"""What a caller holds of a running request: an async stream of token events, `finish()` and `cancel()`.

Lives on the event loop only. The loop pushes events; the consumer takes everything that has come since it last looked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch import TokenLogprob
from kvpool.journal import Miss
from scheduler.request import FinishReason, Request


class TokenEvent(NamedTuple):
    """News of one choice.

    Attributes:
        choice: index among the request's choices.
        token_ids: newly accepted tokens, a stop token included; may be empty on a finish.
        logprobs: one per token when asked for.
        finish_reason: set on the choice's last event.
        stop_token_id: the token that ended it, when one did.
        error: a message for FAILED.
    """

    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestTimes:
    """Moments of a request on the scheduler's clock, in seconds; None until they happen."""

    arrived_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestHandle:
    """An accepted request. Iterate it for lists of events; the iteration ends after the last choice's finish.

    Attributes:
        prompt_logprobs: complete before the first event when asked for (`len(prompt_ids) - 1` entries).
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; known before the first event.
        num_preemptions: over all choices.
        cache_miss: where and why the prompt's match with the prefix cache ended, when asked for; None when it did not.
    """

    request: Request
    times: RequestTimes
    _on_finish: Callable[[int], None]
    _on_cancel: Callable[[], None]
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    cache_miss: Miss | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _events: list[TokenEvent] = field(default_factory=list)
    _num_open: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._num_open = self.request.num_choices

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended (its events may still wait to be read)."""
        return self._num_open == 0

    def finish(self, choice: int) -> None:
        """End one choice now with STOP (its consumer found a stop string); later tokens of it are dropped."""
        self._on_finish(choice)

    def cancel(self) -> None:
        """End every choice with CANCELLED now; harmless when done. Blocks come back once no step can write them."""
        self._on_cancel()

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        """Lists of at least one event, everything that has come since the last; cancels nothing when left early."""
        while True:
            while not self._events:
                if self._num_open == 0:
                    return
                self._wake.clear()
                await self._wake.wait()
            yield self.take()

    def take(self) -> list[TokenEvent]:
        """Everything that has come since the last look, without waiting for more."""
        events, self._events = self._events, []
        return events

    def push(self, event: TokenEvent) -> None:
        """Called by the loop only: append an event and wake the consumer."""
        if event.finish_reason is not None:
            self._num_open -= 1
        self._events.append(event)
        self._wake.set()
