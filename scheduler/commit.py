"""What a step's output changes: accepted tokens, computed KV, published blocks, and who has ended.

Knows one plan and its output at a time; decides nothing about the next. Order of effects per row, fixed: prompt
logprobs, accepted tokens up to the first reason to end, rollback of rejected drafts, publication, then the event.
"""

from typing import NamedTuple

from engine.batch import Row, RowOutput, StepOutput
from scheduler.clock import Clock
from scheduler.handle import TokenEvent
from scheduler.observer import Observer
from scheduler.planner import Plan
from scheduler.request import FinishReason
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceState


class Verdict(NamedTuple):
    """How many of a row's tokens are kept, and why the sequence ends with them, if it does."""

    num_kept: int
    reason: FinishReason | None = None
    stop_token_id: int | None = None


def judge(sequence: Sequence, output: RowOutput) -> Verdict:
    """Cut a row's tokens at the first stop token or at the length limit; at the limit itself a stop wins.

    A token stops only behind `min_tokens` others: the sampler's mask lets none through before.
    """
    request, num_output = sequence.request, sequence.num_output
    sampling = request.sampling
    token_ids = output.token_ids[: request.max_tokens - num_output]
    for index, token_id in enumerate(token_ids):
        if token_id in sampling.stop_token_ids and num_output + index >= sampling.min_tokens:
            return Verdict(index + 1, FinishReason.STOP, token_id)
    if output.stopped and len(token_ids) == len(output.token_ids):
        return Verdict(len(token_ids), FinishReason.STOP)
    if 0 < request.max_tokens <= num_output + len(token_ids):
        return Verdict(len(token_ids), FinishReason.LENGTH)
    return Verdict(len(token_ids))


def goes_on(sequence: Sequence, row: Row, output: RowOutput) -> bool:
    """Whether a row did what nearly every row does: an output went on by one token, and nothing else happened."""
    token_ids, _, prompt_logprobs, draft, stopped, error = output
    if len(token_ids) != 1 or prompt_logprobs or draft or stopped or error is not None:
        return False
    request, num_prompt = sequence.request, sequence.num_prompt
    if row.start < num_prompt or len(row.token_ids) > 1 or sequence.is_drafting:
        return False
    is_last = len(sequence.tokens) - num_prompt + 1 >= request.max_tokens
    return not is_last and token_ids[0] not in request.sampling.stop_token_ids


class Committer:
    """Applies step outputs to the roster."""

    def __init__(self, roster: Roster, clock: Clock, observer: Observer) -> None:
        self._roster = roster
        self._clock = clock
        self._observer = observer
        self._block_size = roster.running.block_size
        self._now_s = clock.now()

    def commit(self, plan: Plan, output: StepOutput) -> int:
        """Apply one step; gives the number of output tokens it delivered. Rows that ended meanwhile are dropped."""
        rows = plan.batch.rows
        assert output.step == plan.batch.step, "an output of another step"
        assert len(output.rows) == len(rows), "a step's output has as many rows as its batch"
        self._now_s = self._clock.now()
        self._roster.offload.keep(plan.saves, output.saved)
        num_kept = 0
        for sequence, row, row_output in zip(plan.sequences, rows, output.rows, strict=True):
            if sequence.state is not SequenceState.RUNNING:
                continue
            if goes_on(sequence, row, row_output):
                self._go_on(sequence, row_output)
                num_kept += 1
            else:
                num_kept += self._commit_row(sequence, row, row_output)
        return num_kept

    def _go_on(self, sequence: Sequence, output: RowOutput) -> None:
        """`_commit_row` for a row that `goes_on`: a block is published when its last token has been computed."""
        group, now_s = sequence.group, self._now_s
        sequence.tokens += output.token_ids
        sequence.computed += 1
        if not sequence.computed % self._block_size:
            self._roster.running.publish(sequence)
        group.num_output_tokens += 1
        assert sequence.last_token_s is not None, "it goes on from a token that was given"
        self._observer.on_token_gap(now_s - sequence.last_token_s, 1)
        group.handle.times.last_token_s = sequence.last_token_s = now_s
        group.handle.push(TokenEvent(sequence.choice, output.token_ids, output.logprobs))

    def _commit_row(self, sequence: Sequence, row: Row, output: RowOutput) -> int:
        if output.error is not None:
            self._roster.end_choice(sequence, FinishReason.FAILED, output.error)
            return 0
        assert bool(output.token_ids) == row.sample, "a row gives tokens exactly when it samples"
        if output.prompt_logprobs:
            self._take_prompt_logprobs(sequence, row, output)
        verdict = judge(sequence, output)
        was_prompt_computed = sequence.is_prompt_computed
        self._advance(sequence, row, output, verdict)
        if not was_prompt_computed and sequence.is_prompt_computed:
            self._prompt_computed(sequence)
        if verdict.num_kept:
            self._deliver(sequence, output, verdict)
        return verdict.num_kept

    def _take_prompt_logprobs(self, sequence: Sequence, row: Row, output: RowOutput) -> None:
        """Keep those not seen yet: a prompt computed again after a preemption repeats the first ones."""
        collected = sequence.group.handle.prompt_logprobs
        collected.extend(output.prompt_logprobs[max(0, len(collected) - row.start) :])

    def _advance(self, sequence: Sequence, row: Row, output: RowOutput, verdict: Verdict) -> None:
        sequence.advance(output.token_ids[: verdict.num_kept], len(row.token_ids) - row.num_drafts)
        if row.num_drafts:
            sequence.table.truncate(max(len(sequence.tokens), sequence.num_reserved))
            sequence.num_synced = min(sequence.num_synced, len(sequence.table.block_ids))
        self._roster.running.publish(sequence)
        sequence.is_drafting = bool(output.draft)
        if output.draft and not sequence.num_flying:  # else its next step is on its way without
            sequence.draft = output.draft[: max(0, sequence.num_left - 1)]

    def _prompt_computed(self, sequence: Sequence) -> None:
        group = sequence.group
        if sequence.request.max_tokens == 0:
            self._roster.end_group(group, FinishReason.LENGTH)
        else:
            self._roster.release_held(group)

    def _deliver(self, sequence: Sequence, output: RowOutput, verdict: Verdict) -> None:
        sequence.group.num_output_tokens += verdict.num_kept
        self._stamp(sequence, verdict.num_kept)
        event = TokenEvent(
            choice=sequence.choice,
            token_ids=output.token_ids[: verdict.num_kept],
            logprobs=output.logprobs[: verdict.num_kept],
            finish_reason=verdict.reason,
            stop_token_id=verdict.stop_token_id,
        )
        if verdict.reason is None:
            sequence.group.handle.push(event)
        else:
            self._roster.end(sequence, event)

    def _stamp(self, sequence: Sequence, num_tokens: int) -> None:
        """Note when the tokens came, and tell the observer."""
        now_s, times = self._now_s, sequence.group.handle.times
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._observer.on_first_token(sequence.request, now_s - times.arrived_s)
        if sequence.last_token_s is not None:
            self._observer.on_token_gap(now_s - sequence.last_token_s, num_tokens)
        times.last_token_s = sequence.last_token_s = now_s
