"""Every live request from acceptance to its last event: who is held, waits, runs, and how each ends, exactly once.

Knows groups, the queue, the running set and observers; knows no engine and no budget. An end reaches the consumer at
once. Its blocks come back only when no step in flight can still write them: `settle`, after each step.
"""

from kvpool.journal import Miss, MissReason, PrefixJournal, PromptChain
from kvpool.table import blocks_for
from scheduler.clock import Clock
from scheduler.handle import TokenEvent
from scheduler.observer import Observer, RequestReport
from scheduler.offload import Offload
from scheduler.queue import Deadlines, WaitingQueue
from scheduler.request import FinishReason, PreemptionReason
from scheduler.running import RunningSet
from scheduler.sequence import Group, Sequence, SequenceState


class Roster:
    """The scheduler's state. Only the event loop's thread touches it."""

    def __init__(
        self, running: RunningSet, offload: Offload, journal: PrefixJournal, clock: Clock, observer: Observer
    ) -> None:
        self.groups: dict[int, Group] = {}
        self.queue = WaitingQueue()
        self.running = running
        self.offload = offload
        self.deadlines = Deadlines()
        self.is_step_in_flight = False  # the loop's to say
        self._leaving: list[Sequence] = []
        self._num_live = 0
        self._journal = journal
        self._clock = clock
        self._observer = observer

    @property
    def num_running(self) -> int:
        """Running sequences that have not ended."""
        return len(self.running.sequences) - len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, further choices of a prompt still being computed included."""
        return self._num_live - self.num_running

    def add(self, group: Group) -> None:
        """Take in an accepted request: its first choice waits, the others are held until the prompt is computed."""
        self.groups[group.arrival] = group
        self.deadlines.add(group)
        self._num_live += len(group.sequences)
        self._enqueue(group.sequences[0])

    def begin(self, sequence: Sequence) -> None:
        """A sequence has entered the running set: out of the queue, and its request is under way."""
        self.queue.remove(sequence)
        if sequence.group.has_begun:
            return
        handle = sequence.group.handle
        handle.times.scheduled_s = self._clock.now()
        handle.num_cached_tokens = min(sequence.computed, sequence.num_prompt)
        if self.running.can_look_up(sequence):
            self._observer.on_prefix_lookup(sequence.num_prompt, handle.num_cached_tokens)
            self._note_match(sequence)
        elif sequence.request.explain_cache:
            handle.cache_miss = Miss(MissReason.NOT_ASKED, 0)

    def fetch(self, sequence: Sequence) -> bool:
        """Whether the first in the queue now waits for blocks that a tier has: others may go ahead meanwhile."""
        if not self.offload.has_tier:
            return False
        is_fetching = self.offload.begin(sequence, *self.running.unknown(sequence))
        if is_fetching:
            self.queue.park(sequence)
        return is_fetching

    def preempt(self, sequence: Sequence, reason: PreemptionReason) -> None:
        """Send a running sequence back to its place in the queue, without blocks and slot."""
        assert not self.is_step_in_flight, "a step in flight may still write the victim's blocks"
        assert not sequence.num_reserved, "a sequence that has all it may need is nobody's victim"
        self.running.leave(sequence)
        sequence.num_preemptions += 1
        sequence.group.handle.num_preemptions += 1
        self._enqueue(sequence)
        self._observer.on_preemption(sequence.request, reason)

    def release_held(self, group: Group) -> None:
        """The prompt is computed: let the other choices queue up, to share it."""
        for sequence in group.held():
            self._enqueue(sequence)

    def end(self, sequence: Sequence, event: TokenEvent) -> None:
        """End one choice with its last `event`. Nothing happens when it has ended before."""
        state, reason = sequence.state, event.finish_reason
        assert reason is not None, "the last event of a choice says why"
        if state is SequenceState.ENDED:
            return
        sequence.state = SequenceState.ENDED
        self._num_live -= 1
        if state is SequenceState.WAITING:
            self.queue.remove(sequence)
        elif state is SequenceState.RUNNING:
            self._leaving.append(sequence)
            if not self.is_step_in_flight:
                self.settle()
        self._record_end(sequence, reason)
        sequence.group.handle.push(event)

    def end_choice(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End one choice without further tokens."""
        self.end(sequence, TokenEvent(sequence.choice, finish_reason=reason, error=error))

    def end_group(self, group: Group, reason: FinishReason, error: str | None = None) -> None:
        """End all choices of a request that have not ended; those held back first, so that none moves up."""
        for sequence in reversed(group.sequences):
            self.end_choice(sequence, reason, error)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every live request."""
        for group in list(self.groups.values()):
            self.end_group(group, reason, error)

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        for group in self.deadlines.pop_expired(self._clock.now()):
            self.end_group(group, FinishReason.DEADLINE)

    def settle(self) -> None:
        """A step is done: take back what ended sequences still hold, but of those that another one still computes."""
        done = [s for s in self._leaving if not s.num_flying]
        self._leaving = [s for s in self._leaving if s.num_flying]
        for sequence in done:
            self.running.leave(sequence)

    def check(self) -> None:
        """Assert the invariants after a step; O(blocks + sequences)."""
        assert self.is_step_in_flight or not self._leaving, "an ended sequence still holds blocks"
        self.running.check()
        live = [s for group in self.groups.values() for s in group.sequences if s.state is not SequenceState.ENDED]
        assert len(live) == self._num_live, "live sequences are miscounted"
        by_state = {state: [s for s in live if s.state is state] for state in SequenceState}
        running = {*by_state[SequenceState.RUNNING], *self._leaving}
        assert running == set(self.running.sequences), "a running sequence is lost"
        assert self.is_step_in_flight or not any(s.num_flying for s in running), "a row never landed"
        assert len(by_state[SequenceState.WAITING]) == len(self.queue), "a waiting sequence is lost"
        assert all(group.is_active for group in self.groups.values()), "a request waits for nothing"
        for sequence in live:
            is_running = sequence.state is SequenceState.RUNNING
            assert is_running or not (sequence.table.block_ids or sequence.computed), "a waiting sequence holds blocks"

    def _note_match(self, sequence: Sequence) -> None:
        """Have the journal count what a new prompt found in the cache and, when asked, explain what it did not."""
        request, handle, block_size = sequence.request, sequence.group.handle, sequence.table.block_size
        digests = sequence.digests[: sequence.num_prompt // block_size]
        chain = PromptChain(request.cache_namespace, request.cache_scope, digests, request.prompt_ids)
        num_blocks = blocks_for(handle.num_cached_tokens, block_size)
        self._journal.found(chain, num_blocks)
        if request.explain_cache:
            handle.cache_miss = self._journal.explain(chain, num_blocks, block_size)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self.queue.push(sequence)

    def _record_end(self, sequence: Sequence, reason: FinishReason) -> None:
        group = sequence.group
        group.finish_reasons[sequence.choice] = reason
        if len(group.finish_reasons) == len(group.sequences):
            self._close(group)
        elif not group.is_active:
            self._enqueue(group.held()[0])

    def _close(self, group: Group) -> None:
        handle = group.handle
        del self.groups[group.arrival]
        self.deadlines.discard(group)
        handle.times.finished_s = self._clock.now()
        self._observer.on_request_end(
            RequestReport(
                request=handle.request,
                finish_reasons=tuple(group.finish_reasons[s.choice] for s in group.sequences),
                num_output_tokens=group.num_output_tokens,
                num_cached_tokens=handle.num_cached_tokens,
                num_preemptions=handle.num_preemptions,
                times=handle.times,
            )
        )
