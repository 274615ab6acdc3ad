"""When a request would begin, give its first token and end, if it came now: the scheduler's future, played forward.

Knows lengths, token counts and how long steps take; knows no blocks, tables or engine, and changes nothing: `predict`
works on a frozen picture and may run in any thread. The same rules as the planner's, in tokens instead of blocks:

    a step     one token for each sequence about to give output, then longer gaps in order, within budget and `pace`
    entering   in order, while a slot is free and what is held stays within the pool at its peak (`forecast`)
    arriving   others come behind the request asked about, as often as of late
    a step's duration = base + per token * tokens             fitted to the steps that were measured

Steps in which nothing changes are taken together, so the work grows with sequences, not with tokens.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle

from scheduler.forecast import Holding, peak_tokens
from scheduler.observer import NullObserver, StepReport

MAX_EVENTS = 20_000
"""Futures with more changes than that are not worth predicting."""

MIN_SPREAD_TOKENS = 1.0
"""Steps whose sizes differ less (standard deviation) say nothing of what a token costs."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step takes, in seconds: `base_s`, and `token_s` for each of its tokens; `mean_s` of those seen."""

    base_s: float
    token_s: float
    mean_s: float = 0.0

    def of(self, num_tokens: int) -> float:
        """A step of so many tokens."""
        return self.base_s + self.token_s * num_tokens


class StepClock(NullObserver):
    """Fits `StepTimes` to the steps it sees: weighted least squares, `memory` steps back."""

    def __init__(self, memory: float = 200.0) -> None:
        self._kept = 1.0 - 1.0 / memory
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._token_s = 0.0

    def on_step(self, report: StepReport) -> None:
        """Take in one step: its tokens, and the time from its plan to its commit."""
        tokens = report.num_prefill_tokens + report.num_decode_tokens
        seconds = report.plan_s + report.engine_s + report.commit_s
        self._weight = self._weight * self._kept + 1.0
        self._tokens = self._tokens * self._kept + tokens
        self._seconds = self._seconds * self._kept + seconds
        self._squares = self._squares * self._kept + tokens * tokens
        self._products = self._products * self._kept + tokens * seconds

    @property
    def times(self) -> StepTimes | None:
        """The fit; None before the first step. A slope once seen is kept while all steps are of one size."""
        if not self._weight:
            return None
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_tokens**2
        if variance > MIN_SPREAD_TOKENS**2:
            self._token_s = max(0.0, (self._products / self._weight - mean_tokens * mean_s) / variance)
        token_s = min(self._token_s, mean_s / mean_tokens)
        return StepTimes(mean_s - token_s * mean_tokens, token_s, mean_s)


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence as far as its future goes.

    Attributes:
        num_held: tokens whose KV it holds alone once it runs, those of its gap included.
        num_gap: tokens to compute before its next output token; 1 when it is about to give one.
        num_output: output tokens it should still give.
    """

    num_held: int
    num_gap: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Who is expected to come: one of `loads` each `interval_s` seconds, in turn."""

    interval_s: float
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """The scheduler at one moment.

    Attributes:
        running, waiting: in the policy's order.
        num_slots: sequences that may run at once.
        num_step_tokens: token budget of one step.
        num_pool_tokens: tokens that sequences may hold together.
        times: None when no step has been measured.
        step_left_s: what the step in flight should still take.
        arrivals: None when nobody else is expected.
        num_beside_streams: prompt tokens that a step may compute beside so many streams, for so many sequences that
            read their prompts or could; None for no limit.
    """

    running: tuple[Load, ...]
    waiting: tuple[Load, ...]
    num_slots: int
    num_step_tokens: int
    num_pool_tokens: int
    times: StepTimes | None
    step_left_s: float = 0.0
    arrivals: Arrivals | None = None
    num_beside_streams: Callable[[int, int], int] | None = None

    def fits_now(self, load: Load) -> bool:
        """Whether a request would enter with the next step."""
        has_slot = not self.waiting and len(self.running) < self.num_slots
        return has_slot and self.has_room([*self.running, load])

    def has_room(self, loads: Iterable[Load]) -> bool:
        """Whether the pool should hold these together, at their peak."""
        return peak_tokens(Holding(load.num_held, load.num_output) for load in loads) <= self.num_pool_tokens


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now until a request's first step, first output token, and last."""

    queue_wait_s: float
    ttft_s: float
    finish_s: float


@dataclass(slots=True, eq=False)
class _Runner:
    """A sequence in the play."""

    held: int
    gap: int
    left: int

    def load(self) -> Load:
        return Load(self.held, self.gap, self.left)


def predict(outlook: Outlook, load: Load) -> Prediction | None:
    """Play on until a request that comes now is done. None when no step was ever measured, or it takes too long."""
    if outlook.times is None:
        return None
    return _Play(outlook, outlook.times, load).result()


class _Play:
    """One future. The request asked about is last in line, before those that are still to come."""

    def __init__(self, outlook: Outlook, times: StepTimes, load: Load) -> None:
        self._outlook = outlook
        self._times = times
        self._now_s = outlook.step_left_s
        self._target = _runner(load)
        self._running = [_runner(each) for each in outlook.running]
        self._waiting = deque([*map(_runner, outlook.waiting), self._target])
        self._newcomers = cycle(outlook.arrivals.loads) if outlook.arrivals else None
        self._next_arrival_s = outlook.arrivals.interval_s if outlook.arrivals else math.inf
        self._begun_s: float | None = None
        self._first_s: float | None = None

    def result(self) -> Prediction | None:
        for _ in range(MAX_EVENTS):
            self._advance()
            if self._target.left <= 0 and self._begun_s is not None and self._first_s is not None:
                return Prediction(self._begun_s, self._first_s, self._now_s)
        return None

    def _advance(self) -> None:
        """As many steps as pass before anything changes."""
        self._welcome()
        grants = self._share_out()
        step_s = self._times.of(sum(tokens for _, tokens in grants))
        num_steps = min(_steps_until_change(runner, tokens) for runner, tokens in grants)
        if num_steps * step_s > self._next_arrival_s - self._now_s:
            num_steps = min(num_steps, math.ceil((self._next_arrival_s - self._now_s) / step_s))
        for runner, tokens in grants:
            gave_output = _move(runner, tokens, num_steps)
            if gave_output and runner is self._target and self._first_s is None:
                self._first_s = self._now_s + step_s
        self._now_s += num_steps * step_s
        self._running = [runner for runner in self._running if runner.left > 0]

    def _welcome(self) -> None:
        """Queue those who have come by now."""
        arrivals = self._outlook.arrivals
        while arrivals and self._newcomers and self._next_arrival_s <= self._now_s:
            self._waiting.append(_runner(next(self._newcomers)))
            self._next_arrival_s += arrivals.interval_s

    def _share_out(self) -> list[tuple[_Runner, int]]:
        """Tokens of the next step: who is about to give output, then gaps in order, then newcomers."""
        budget = self._budget()
        grants: list[tuple[_Runner, int]] = []
        for runner in sorted(self._running, key=lambda runner: runner.gap > 1):
            budget -= _grant(grants, runner, budget)
        while budget and self._waiting and self._may_enter(self._waiting[0]):
            runner = self._waiting.popleft()
            self._enter(runner)
            budget -= _grant(grants, runner, budget)
        return grants

    def _budget(self) -> int:
        """Tokens of the next step; see `scheduler.pace`."""
        num_streams, beside = sum(runner.gap == 1 for runner in self._running), self._outlook.num_beside_streams
        num_free = min(len(self._waiting), self._outlook.num_slots - len(self._running))
        num_reading = len(self._running) - num_streams + num_free
        if beside is None or not num_streams or not num_reading:
            return self._outlook.num_step_tokens
        return min(self._outlook.num_step_tokens, num_streams + beside(num_streams, num_reading))

    def _may_enter(self, runner: _Runner) -> bool:
        if not self._running:
            return True
        has_slot = len(self._running) < self._outlook.num_slots
        return has_slot and self._outlook.has_room([each.load() for each in (*self._running, runner)])

    def _enter(self, runner: _Runner) -> None:
        self._running.append(runner)
        if runner is self._target:
            self._begun_s = self._now_s


def _runner(load: Load) -> _Runner:
    return _Runner(load.num_held, max(1, load.num_gap), max(1, load.num_output))


def _grant(grants: list[tuple[_Runner, int]], runner: _Runner, budget: int) -> int:
    tokens = min(runner.gap, budget)
    if tokens:
        grants.append((runner, tokens))
    return tokens


def _steps_until_change(runner: _Runner, tokens: int) -> int:
    """Steps of this share before it closes its gap or ends; the closing one goes on its own."""
    return runner.left if runner.gap == 1 else max(1, (runner.gap - 1) // tokens)


def _move(runner: _Runner, tokens: int, num_steps: int) -> bool:
    """Take these steps; whether they gave output."""
    if runner.gap > tokens * num_steps:
        runner.gap -= tokens * num_steps
        return False
    num_given = num_steps if runner.gap == 1 else 1
    runner.gap = 1
    runner.left -= num_given
    runner.held += num_given
    return True
