"""Instruments: what the scheduler tells whoever watches. It imports no metrics library; observers may not raise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.handle import RequestTimes
from scheduler.request import FinishReason, PreemptionReason, Request


class StepReport(NamedTuple):
    """One finished step: what was planned, what came out, and how long each part took, in seconds."""

    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    plan_s: float
    engine_s: float
    commit_s: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """An accepted request that has ended: told exactly once for each.

    `finish_reasons` holds one per choice; `output_tokens` counts over all choices (tokens after a `finish()` not
    counted); `times` are on the scheduler's clock.
    """

    request: Request
    finish_reasons: tuple[FinishReason, ...]
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    times: RequestTimes


class Observer(Protocol):
    """Called on the event loop, in step order. Subclass `NullObserver` and override what you need."""

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        """A request's first output token was committed, `ttft_s` after its arrival."""

    def on_token_gap(self, gap_s: float, num_tokens: int) -> None:
        """A sequence got `num_tokens` more tokens, `gap_s` after its previous ones."""

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """A request's first step is planned, and its prompt was looked up in the prefix index: once per request."""

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        """A running sequence lost its blocks and waits again."""

    def on_request_end(self, report: RequestReport) -> None:
        """An accepted request ended, however it did."""


class NullObserver:
    """Watches nothing."""

    def on_step(self, report: StepReport) -> None:
        """Ignore."""

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        """Ignore."""

    def on_token_gap(self, gap_s: float, num_tokens: int) -> None:
        """Ignore."""

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Ignore."""

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        """Ignore."""

    def on_request_end(self, report: RequestReport) -> None:
        """Ignore."""


class Observers:
    """Several observers as one, told in the order given.

    Steps come fast, and token gaps by the hundred in each: only those who do something about them are told.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._step_observers = [o for o in observers if not _ignores(o.on_step, NullObserver.on_step)]
        self._gap_observers = [o for o in observers if not _ignores(o.on_token_gap, NullObserver.on_token_gap)]

    def on_step(self, report: StepReport) -> None:
        """Tell all who listen."""
        for observer in self._step_observers:
            observer.on_step(report)

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_first_token(request, ttft_s)

    def on_token_gap(self, gap_s: float, num_tokens: int) -> None:
        """Tell all who listen."""
        for observer in self._gap_observers:
            observer.on_token_gap(gap_s, num_tokens)

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_prefix_lookup(num_queried_tokens, num_hit_tokens)

    def on_preemption(self, request: Request, reason: PreemptionReason) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_preemption(request, reason)

    def on_request_end(self, report: RequestReport) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_request_end(report)


def _ignores(method: Callable[..., None], ignoring: Callable[..., None]) -> bool:
    """Whether an observer's bound method is the one of `NullObserver`."""
    return getattr(method, "__func__", None) is ignoring
