"""The loop: plan a step, run it, commit it; and the door through which requests come in.

All state changes on one event loop; only the engine's own threads run beside it. Steps fly: one is launched with its
plan, lands with its output, and is committed then, in the order of launching. With two in flight the host works ahead
of the device: it plans and launches step N + 1 while N runs, and commits N while N + 1 runs.

    host      plan N+1 | launch |     wait      | commit N | plan N+2 | launch | ...
    device      N ............................... | N+1 ........................... | N+2 ...

So an end takes effect one step late: a row of N + 1 whose sequence ended in N is void, its output is dropped, and the
sequence keeps slot and blocks until N + 1 has landed. What cannot be planned ahead waits until nothing is in flight,
and is planned as it always was.

The one broad `except` of the house is here: whatever breaks, every accepted request gets an answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial

from engine.batch import StepEngine, StepOutput
from engine.errors import EngineDead, StepError
from kvpool.journal import POOLS_REMEMBERED, PrefixJournal
from kvpool.pool import BlockPool
from kvpool.prefix import PrefixListeners
from scheduler.admission import Admission, DrainMeter
from scheduler.clock import Clock, MonotonicClock
from scheduler.commit import Committer
from scheduler.config import SchedulerConfig
from scheduler.errors import Draining, Unhealthy
from scheduler.forecast import ArrivalMeter, LengthForecast
from scheduler.handle import RequestHandle, RequestTimes
from scheduler.kv_report import KVReport, LookupMeter, report
from scheduler.observer import Observer, Observers, StepReport
from scheduler.offload import Backing, Offload
from scheduler.outlook import Foresight, Meters, Question
from scheduler.pace import PaceMeter
from scheduler.planner import Plan, Planner
from scheduler.queue import policy_order
from scheduler.request import FinishReason, Request
from scheduler.roster import Roster
from scheduler.running import RunningSet
from scheduler.sequence import Group, Sequence
from scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step in flight: what it computes, how long that took to plan, and its output to come."""

    plan: Plan
    plan_s: float
    output: Awaitable[StepOutput]


class Scheduler:
    """Continuous batching of many requests over one engine and one KV pool."""

    def __init__(
        self,
        engine: StepEngine,
        pool: BlockPool,
        config: SchedulerConfig,
        *,
        observer: Observer | None = None,
        clock: Clock | None = None,
        backing: Backing | None = None,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._config = config
        self._clock = clock or MonotonicClock()
        self._meter = DrainMeter()
        self._backing = backing or Backing()
        forecast, listener = LengthForecast(), self._backing.listener
        self._arrivals = ArrivalMeter()
        self._lookups, pace = LookupMeter(), PaceMeter(config.decode_stretch)
        meters = (self._meter, forecast, self._arrivals, self._lookups, pace)
        self._observer = Observers(*meters, *([observer] if observer else []))
        self._offload = Offload(self._backing.tier)
        self._journal = PrefixJournal(self._clock.now, POOLS_REMEMBERED * pool.num_blocks)
        listeners = PrefixListeners(self._journal, *([listener] if listener else []))
        running = RunningSet(pool, config, self._offload, forecast, listeners)
        self._roster = Roster(running, self._offload, self._journal, self._clock, self._observer)
        self._foresight = Foresight(self._roster, pool, config, Meters(forecast, self._arrivals, pace))
        self._planner = Planner(self._roster, config, pace)
        self._committer = Committer(self._roster, self._clock, self._observer)
        self._admission = Admission(config, pool.num_blocks)
        self._wake = asyncio.Event()
        self._offload.connect(self._fetched, self._wake.set)
        self._timer: asyncio.TimerHandle | None = None
        self._num_arrivals = 0
        self._num_failures = 0
        self._flights: deque[Flight] = deque()
        self._step_began_s: float | None = None
        self._is_draining = False
        self._is_stopped = False
        self._unhealthy: str | None = None

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; its handle yields at least one event per choice, whatever happens.

        Raises:
            Unhealthy, Draining: nothing is taken any more.
            ContextTooLong, NeverFits: this request could never run.
            QueueFull: not now; carries when to try again.
        """
        self._check_acceptable(request)
        group = self._new_group(request)
        self._roster.add(group)
        self._arrivals.on_arrival(group.handle.times.arrived_s)
        self._watch_deadlines()
        self._wake.set()
        return group.handle

    async def run(self) -> None:
        """Serve until `stop`, or until a drain has finished. However it is left, no request stays unanswered."""
        try:
            while self._flights or not self._is_over:
                if not self._launch():
                    await (self._land() if self._flights else self._idle())
                    self._roster.expire()
                elif self._config.max_steps_in_flight > 1:
                    await asyncio.sleep(0)  # the engine begins before the next step is planned
        finally:
            self._shut_down()

    def drain(self) -> None:
        """Take nothing new, finish what was accepted, save what a durable tier lacks; `run` then returns."""
        self._is_draining = True
        self._wake.set()

    def stop(self) -> None:
        """Cancel everything; `run` returns as soon as no step is in flight."""
        self._is_stopped = True
        self._roster.end_all(FinishReason.CANCELLED)
        self._wake.set()

    def stats(self) -> SchedulerStats:
        """A snapshot for health checks and metrics."""
        began_s, queue = self._step_began_s, self._roster.queue
        return SchedulerStats(
            num_running=self._roster.num_running,
            num_waiting=self._roster.num_waiting,
            num_waiting_tokens=queue.num_new_tokens,
            drain_tokens_per_s=self._meter.tokens_per_s,
            step_running_s=None if began_s is None else self._clock.now() - began_s,
            is_draining=self._is_draining or self._is_stopped,
            unhealthy=self._unhealthy,
            pool=self._pool.stats(),
            tiers=self._offload.tier.stats(),
            num_pinned_blocks=self._roster.running.pins.num_pinned,
        )

    def foresee(self, request: Request) -> Question:
        """What would become of a request that came now; `scheduler.predict.predict` plays it forward.

        Raises:
            RequestRefused: it would not be taken; as `submit`.
        """
        self._check_acceptable(request)
        return self._foresight.question(request, self._clock.now(), self.stats().step_running_s)

    def kv_report(self, num_shared: int = 10) -> KVReport:
        """A closer look at the pool than `stats`: waste, ages, and the `num_shared` most useful prefixes; O(blocks)."""
        return report(self._roster.running, self._pool, self._journal, self._lookups, num_shared=num_shared)

    def check(self) -> None:
        """Assert the invariants of queue, running set, tables, prefix index and pool, between two steps."""
        self._roster.check()

    @property
    def _is_over(self) -> bool:
        is_done = not self._roster.groups and not self._offload.is_behind
        return self._is_stopped or (self._is_draining and is_done)

    def _check_acceptable(self, request: Request) -> None:
        self._check_open()
        self._admission.check_fits(request)
        queue, num_free_slots = self._roster.queue, self._roster.running.num_free_slots
        self._admission.check_queue(request, queue, num_free_slots, self._turn_s)

    def _turn_s(self) -> float | None:
        return self._foresight.turn_s(self._clock.now(), self.stats().step_running_s)

    def _check_open(self) -> None:
        if self._unhealthy is not None:
            raise Unhealthy(self._unhealthy)
        if self._is_draining or self._is_stopped:
            raise Draining("The server is shutting down and takes no new requests.")

    def _new_group(self, request: Request) -> Group:
        arrival, policy = self._num_arrivals, self._config.policy
        self._num_arrivals += 1
        handle = RequestHandle(
            request, RequestTimes(self._clock.now()), partial(self._finish, arrival), partial(self._cancel, arrival)
        )
        group = Group(handle, arrival)
        for choice in range(request.num_choices):
            order, table = policy_order(policy, request, arrival, choice), self._roster.running.new_table()
            group.sequences.append(Sequence(group, request, choice, order, list(request.prompt_ids), table))
        return group

    def _finish(self, arrival: int, choice: int) -> None:
        if group := self._roster.groups.get(arrival):
            self._roster.end_choice(group.sequences[choice], FinishReason.STOP)

    def _cancel(self, arrival: int) -> None:
        if group := self._roster.groups.get(arrival):
            self._roster.end_group(group, FinishReason.CANCELLED)

    def _fetched(self, sequence: Sequence) -> None:
        """What a parked sequence waited for is here, or is not coming."""
        self._roster.queue.unpark(sequence)
        self._wake.set()

    async def _idle(self) -> None:
        """Nothing can be done now: sleep until somebody comes, a tier has read blocks, or the end is asked for."""
        if self._config.check_invariants:
            self.check()
        self._wake.clear()
        await self._wake.wait()

    def _launch(self) -> bool:
        """Plan one more step and give it to the engine; False when the next thing to do is to wait."""
        if self._is_over or len(self._flights) >= self._config.max_steps_in_flight:
            return False
        began_s = self._clock.now()
        plan = self._planner.plan_ahead() if self._flights else self._planner.plan()
        if plan is None:
            return False
        output: Awaitable[StepOutput] = self._engine.step(plan.batch)
        if self._config.max_steps_in_flight > 1:
            output = asyncio.ensure_future(output)  # begins before anybody waits for it
        if not self._flights:
            self._step_began_s = self._clock.now()
        self._flights.append(Flight(plan, self._clock.now() - began_s, output))
        self._roster.is_step_in_flight = True
        return True

    async def _land(self) -> None:
        """Wait for the oldest step in flight, and let it take effect."""
        flight = self._flights[0]
        try:
            self._commit(flight, await self._arrival(flight))
        except EngineDead as error:
            self._turn_unhealthy(f"The engine is dead: {error}")
        except Exception as error:  # noqa: BLE001  whatever it was, it fails these requests and no others
            self._step_failed(flight.plan, error)

    async def _arrival(self, flight: Flight) -> StepOutput:
        try:
            return await flight.output
        finally:
            self._touch_down()

    def _touch_down(self) -> None:
        """The oldest step in flight is over, well or not."""
        plan = self._flights.popleft().plan
        if self._flights:
            for sequence, row in zip(plan.sequences, plan.batch.rows, strict=True):
                sequence.land(row)
        else:  # nothing of any sequence is left in flight
            for sequence in plan.sequences:
                sequence.num_flying = sequence.num_pending = 0
        self._roster.is_step_in_flight = bool(self._flights)
        self._step_began_s = self._clock.now() if self._flights else None

    def _commit(self, flight: Flight, output: StepOutput) -> None:
        began_s = self._clock.now()
        num_output_tokens = self._committer.commit(flight.plan, output)
        self._roster.settle()
        self._num_failures = 0
        if flight.plan.batch.rows:
            self._report(flight.plan, output, num_output_tokens, (flight.plan_s, began_s))

    def _report(self, plan: Plan, output: StepOutput, num_output_tokens: int, times: tuple[float, float]) -> None:
        plan_s, began_s = times
        report = StepReport(
            num_rows=len(plan.batch.rows),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=plan.num_decode_tokens,
            num_output_tokens=num_output_tokens,
            plan_s=plan_s,
            engine_s=output.duration_s,
            commit_s=self._clock.now() - began_s,
            num_running=self._roster.num_running,
            num_waiting=self._roster.num_waiting,
        )
        self._foresight.step_clock.on_step(report)
        self._observer.on_step(report)

    def _step_failed(self, plan: Plan, error: Exception) -> None:
        """Fail the requests of a lost step, and give up on an engine that does nothing else."""
        self._num_failures += 1
        logger.error("step %d failed: %s", plan.batch.step, error, exc_info=not isinstance(error, StepError))
        for sequence, row in zip(plan.sequences, plan.batch.rows, strict=True):
            self._roster.running.distrust(sequence, row.start, row.start + len(row.token_ids))
        for sequence in plan.sequences:
            self._roster.end_group(sequence.group, FinishReason.FAILED, f"The engine failed: {error}")
        self._roster.settle()
        if self._num_failures >= self._config.max_engine_failures:
            self._turn_unhealthy(f"{self._num_failures} engine steps in a row failed, at last with: {error}")

    def _turn_unhealthy(self, reason: str) -> None:
        if self._unhealthy is None:  # else a step that was in flight when it happened
            logger.error("unhealthy: %s", reason)
            self._unhealthy = reason
        self._offload.on_cleared()  # nothing will be read out any more
        self._roster.end_all(FinishReason.FAILED, reason)
        self._roster.settle()

    def _watch_deadlines(self) -> None:
        """Have the next deadline end its requests on time, even while a long step is in flight."""
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._roster.deadlines.next_s
        if next_s is None:
            self._timer = None
        else:
            delay_s = max(0.0, next_s - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._roster.expire()
        self._watch_deadlines()

    def _shut_down(self) -> None:
        if not self._is_over:
            self._unhealthy = self._unhealthy or "The scheduler's loop was ended."
        while self._flights:  # nobody waits for them any more
            _abandon(self._flights[0].output)
            self._touch_down()
        self._roster.end_all(FinishReason.FAILED, "The server stopped before the request was finished.")
        self._roster.settle()
        self._offload.close()
        self._backing.close()
        if self._timer is not None:
            self._timer.cancel()


def _abandon(output: Awaitable[StepOutput]) -> None:
    """Have nobody told that an output was never asked for."""
    if isinstance(output, asyncio.Future):
        output.cancel()
        output.add_done_callback(lambda done: done.cancelled() or done.exception())
