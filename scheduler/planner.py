"""What one step computes: a frozen `Batch`, and the sequence behind each of its rows.

Knows budget, queue and running set; knows no engine. Order of effects, fixed:

    1. share out    tokens: first who is about to give output, then longer gaps in policy order, at their `pace`
    2. make room    blocks: in policy order; whoever is behind gives way
    3. let in       from the queue's head while tokens, blocks and slots last; not in a step that preempted
    4. save         what the pool took from the cache for all this; with nothing else to do, what a crash would lose

A step may be planned ahead, while the one before it is in flight. Its rows begin where that one ends, with tokens that
are yet to be sampled. Only what is certain is planned ahead: whatever needs the step in flight to be done (a sequence
that must give way, drafts to be verified, a table to give back) waits for it.
"""

from dataclasses import dataclass, field
from itertools import repeat

from engine.batch import PENDING, Batch, BlockLoad, Row, SlotStart, tuples_of
from kvpool.table import BlockCopy
from scheduler.budget import Share, TokenBudget, allot, gaps_of
from scheduler.config import SchedulerConfig
from scheduler.offload import Save
from scheduler.pace import PaceMeter
from scheduler.preemption import make_room
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceState

_PENDING = (PENDING,)

MAX_IDLE_SAVES = 8
"""Blocks read out in one step that does nothing else: whoever arrives meanwhile waits for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, ready for the engine. `sequences[i]` owns `batch.rows[i]`, `saves[i]` names `batch.saves[i]`.

    `num_decode_tokens` are those of rows that only continue an output: the newest token, and drafts. All others are
    prefill tokens.
    """

    batch: Batch
    sequences: tuple[Sequence, ...]
    saves: tuple[Save, ...]
    num_prefill_tokens: int
    num_decode_tokens: int


def all_go_on(grants: list[Share], starts: list[int]) -> bool:
    """Whether all that is granted is each sequence's newest token, and an output token: what most steps are."""
    return all(
        num_tokens == 1 and start >= s.num_prompt and start + 1 == len(s.tokens) + s.num_pending
        for (s, num_tokens), start in zip(grants, starts, strict=True)
    )


@dataclass(slots=True)
class _Sketch:
    """A plan being made."""

    budget: TokenBudget
    starts: list[SlotStart] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def add_rows(self, grants: list[Share], needs: list[int]) -> None:
        """Rows of these sequences, whose room is certain: for `grants[i]` are `needs[i]` blocks to be taken."""
        starts = [s.computed + s.num_flying for s, _ in grants]
        if not all_go_on(grants, starts):
            for (sequence, num_tokens), num_needed in zip(grants, needs, strict=True):
                self.add_row(sequence, num_tokens, num_needed)
            return
        for (sequence, _), start, num_needed in zip(grants, starts, needs, strict=True):
            if num_needed:
                self._prepare(sequence, start, start + 1)
        self._add_next(sequences := [s for s, _ in grants], starts)
        self.sequences += sequences
        self.num_decode_tokens += len(sequences)

    def _add_next(self, sequences: list[Sequence], starts: list[int]) -> None:
        """`add_row` for sequences that go on by their newest token, each at its start: column by column."""
        new_blocks = [
            tuple(ids[s.num_synced :]) if len(ids := s.table.block_ids) > s.num_synced else () for s in sequences
        ]
        columns = (
            [s.slot for s in sequences],
            starts,
            [_PENDING if s.num_pending else (s.tokens[-1],) for s in sequences],
            [s.num_synced for s in sequences],
            new_blocks,
            repeat(True),  # sample
            repeat(0),  # drafts
            repeat(()),  # prompt targets
        )
        self.rows += tuples_of(Row, zip(*columns, strict=False))
        for sequence, block_ids in zip(sequences, new_blocks, strict=True):
            sequence.num_synced += len(block_ids)
            sequence.num_flying += 1
            sequence.num_pending += 1

    def add_row(self, sequence: Sequence, num_tokens: int, num_needed: int) -> None:
        """Compute the next `num_tokens` of a sequence whose room is certain: `num_needed` blocks are to be taken."""
        start = sequence.computed + sequence.num_flying
        if num_needed:
            self._prepare(sequence, start, start + num_tokens)
        num_known = len(sequence.tokens) + sequence.num_pending - start
        offset, block_ids = sequence.num_synced, sequence.table.block_ids
        is_output = start >= sequence.num_prompt
        row = Row(
            sequence.slot,
            start,
            sequence.span(num_tokens),
            offset,
            tuple(block_ids[offset:]) if offset < len(block_ids) else (),
            num_tokens >= num_known and sequence.request.max_tokens > 0,
            num_tokens - num_known if num_tokens > num_known else 0,
            () if is_output else sequence.prompt_targets(num_tokens),
        )
        sequence.num_synced = len(block_ids)
        sequence.take_off(row)
        self.rows.append(row)
        self.sequences.append(sequence)
        if is_output and num_tokens - row.num_drafts == 1:
            self.num_decode_tokens += num_tokens
        else:
            self.num_prefill_tokens += num_tokens

    def _prepare(self, sequence: Sequence, start: int, end: int) -> None:
        """Make positions `[start, end)` writable."""
        first_changed, copies = sequence.table.prepare_write(start, end)
        self.copies.extend(copies)
        sequence.num_synced = min(sequence.num_synced, first_changed)


class Planner:
    """Makes plans from the roster, and changes it as they ask: sequences enter, grow, and are preempted."""

    def __init__(self, roster: Roster, config: SchedulerConfig, pace: PaceMeter) -> None:
        self._roster = roster
        self._pace = pace
        self._num_step_tokens = config.max_num_batched_tokens
        self._num_steps = 0

    def plan(self) -> Plan | None:
        """The next step, when none is in flight; None when nothing can be done now."""
        assert not self._roster.is_step_in_flight, "beside a step in flight, only what is certain may be planned"
        self._roster.running.new_step()
        while True:
            gaps = gaps_of(self._roster.running.sequences)
            sketch = _Sketch(self._budget(gaps))
            did_preempt = self._serve_running(gaps, sketch)
            if not did_preempt:
                self._let_in(sketch)
            if sketch.rows:
                return self._freeze(sketch, self._roster.offload.take_saves())
            if not did_preempt:
                assert self._roster.queue.head is None, "an idle engine must take what waits"
                return self._save_idly(sketch)

    def plan_ahead(self) -> Plan | None:
        """A step to follow those in flight, or None when they must be done first.

        All that run go on together: who would be left out now would be out of step with the others from then on.
        """
        running = self._roster.running
        if any(s.is_drafting and s.num_flying for s in running.sequences):
            return None
        running.new_step()
        gaps = gaps_of(s for s in running.sequences if s.state is SequenceState.RUNNING)
        sketch = _Sketch(self._budget(gaps))
        grants = allot(gaps, sketch.budget)
        needs = running.needs_of(grants)
        if not running.has_spare(sum(needs)):
            return None
        sketch.add_rows(grants, needs)
        self._let_in(sketch)
        return self._freeze(sketch, self._roster.offload.take_saves()) if sketch.rows else None

    def _budget(self, gaps: list[Share]) -> TokenBudget:
        """Tokens of the next step. Beside sequences that stream, prompts get no more than the pace allows."""
        running, num_left = self._roster.running, self._num_step_tokens
        streams = [num_ready for s, num_ready in gaps if num_ready == 1 or s.is_caught_up]
        num_free = min(len(self._roster.queue), running.num_free_slots)
        num_reading = len(running.sequences) - len(streams) + num_free
        num_prompt_tokens = self._pace.num_prompt_tokens(len(streams), num_reading)
        if num_prompt_tokens is not None:
            num_left = min(num_left, sum(streams) + num_prompt_tokens)
        return TokenBudget(num_left)

    def _serve_running(self, gaps: list[Share], sketch: _Sketch) -> bool:
        """Give rows to running sequences; True when that preempted any."""
        running, preempt = self._roster.running, self._roster.preempt
        grants = allot(gaps, sketch.budget)
        needs = running.needs_of(grants)
        if running.has_spare(sum(needs)):
            sketch.add_rows(grants, needs)
            return False
        num_before = len(running.sequences)
        for sequence, num_tokens in grants:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for one ahead of it
            num_needed = running.num_needed(sequence, num_tokens)
            if num_needed and sequence.draft and not running.has_room(sequence, num_tokens):
                num_tokens = min(num_tokens, len(sequence.tokens) - sequence.computed)
            if not num_needed or make_room(running, sequence, num_tokens, preempt):
                sketch.add_row(sequence, num_tokens, num_needed)
        return len(running.sequences) < num_before

    def _let_in(self, sketch: _Sketch) -> None:
        """Admit from the queue's head. Nobody overtakes it while it waits for memory, so it cannot starve."""
        roster = self._roster
        while sketch.budget.left and roster.running.num_free_slots and (sequence := roster.queue.head):
            if roster.fetch(sequence):
                continue
            entry = roster.running.try_enter(sequence)
            if entry is None:
                return
            roster.begin(sequence)
            sketch.starts.append(sequence.slot_start())
            sketch.loads.extend(entry.loads)
            sketch.copies.extend(entry.copies)
            num_tokens = sketch.budget.take(sequence.gap)
            sketch.add_row(sequence, num_tokens, roster.running.num_needed(sequence, num_tokens))

    def _save_idly(self, sketch: _Sketch) -> Plan | None:
        roster = self._roster
        saves = roster.offload.take_saves() + roster.offload.take_idle_saves(roster.running.block_of, MAX_IDLE_SAVES)
        return self._freeze(sketch, saves) if saves else None

    def _freeze(self, sketch: _Sketch, saves: list[Save]) -> Plan:
        self._num_steps += 1
        batch = Batch(
            step=self._num_steps,
            starts=tuple(sketch.starts),
            copies=tuple(sketch.copies),
            rows=tuple(sketch.rows),
            saves=tuple(save.block_id for save in saves),
            loads=tuple(sketch.loads),
        )
        sequences, num_prefill_tokens = tuple(sketch.sequences), sketch.num_prefill_tokens
        return Plan(batch, sequences, tuple(saves), num_prefill_tokens, sketch.num_decode_tokens)
