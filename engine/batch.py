"""The two values that cross the line between scheduler and engine: `Batch` down, `StepOutput` up. Frozen, torch-free.

What a step makes for each of its rows is a tuple with names: as frozen, and an eighth of the time to make.

One engine step carries rows of any kind: a row computes KV for `token_ids` at positions `start, start + 1, ...` of one
slot, and may sample the token that follows its last one. A prefill chunk, a decode step and a verified draft differ
only in these numbers. Order inside a step, fixed:

    1. `starts`   reset slots to new sequences
    2. `saves`    whole blocks are read out, before anything reuses them
    3. `loads`    whole blocks are filled with what was read out of others, in this run or an earlier one
    4. `copies`   block copies, in the order given
    5. `rows`     block-table updates, KV writes, attention, sampling

Steps run in the order they were given, and one may be given while those before it still run. A row may then begin with
`PENDING`: the token that its slot samples in the step before, which nobody knows yet.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from engine.sampling.constraint import Constraint
from engine.sampling.params import SamplingParams
from kvpool.table import BlockCopy

T = TypeVar("T", bound=tuple[Any, ...])

PENDING = -1
"""Stands in a row's `token_ids` for the token that its slot sampled last, in a step given before."""


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a slot: everything the engine must remember about it between steps.

    Attributes:
        slot: which row of persistent state, `0 <= slot < max_num_seqs`.
        choice: index among the request's choices; part of the random key.
        prompt_ids: for the repetition penalty.
        output_ids: tokens accepted before this moment (not empty after a preemption).
    """

    slot: int
    params: SamplingParams
    choice: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None


class Row(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        slot: the sequence's slot.
        start: position of `token_ids[0]`; the KV of all earlier positions is in the pool.
        token_ids: tokens to compute, at least one; `PENDING` only as the first.
        block_offset, block_ids: the slot's block-table row becomes `block_ids` from entry `block_offset` on.
        sample: whether to sample the token after the last one (False for a prefill chunk that is not the last).
        num_drafts: how many of `token_ids`, at the end, are unverified drafts.
        prompt_targets: for prompt logprobs: the prompt tokens that follow position `start`, `start + 1`, ...; empty
            when not asked for. May be one shorter than `token_ids` on the last chunk.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_offset: int
    block_ids: tuple[int, ...]
    sample: bool
    num_drafts: int = 0
    prompt_targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """An order to fill a whole block, all layers, with bytes that a save of an equal layout gave."""

    block_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """The frozen plan of one step. `step` counts up; slots are distinct over the rows.

    `saves` are block ids. A batch without rows only moves blocks.
    """

    step: int
    starts: tuple[SlotStart, ...]
    copies: tuple[BlockCopy, ...]
    rows: tuple[Row, ...]
    saves: tuple[int, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute over all rows."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def only_moves_blocks(self) -> bool:
        """Whether there is nothing to compute, and blocks to move."""
        return not self.rows and bool(self.saves or self.loads)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model's raw distribution, and the alternatives asked for.

    `rank` is 1 for the most likely token. `top_ids` / `top_logprobs` are sorted, most likely first; with requested
    `logprob_token_ids` these follow after the most likely ones. Values are finite, floored at -9999.0.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RowOutput(NamedTuple):
    """What a row produced.

    Attributes:
        token_ids: accepted tokens: verified drafts first, the sampled one last; empty when the row did not sample.
        logprobs: one per accepted token when the slot asked for them, else empty.
        prompt_logprobs: one per entry of the row's `prompt_targets`.
        draft: proposed tokens for the next step.
        stopped: the slot's constraint is complete: nothing may follow these tokens.
        error: why this row alone failed (the sequence ends with it); None when it did not.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    draft: tuple[int, ...] = ()
    stopped: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One output per row of the batch, in its order, and how long the step took on the engine's thread.

    `saved` holds the bytes of each block in the batch's `saves`, in its order.
    """

    step: int
    rows: tuple[RowOutput, ...]
    duration_s: float
    saved: tuple[bytes, ...] = ()


def tuples_of(kind: type[T], fields: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Many named tuples of one kind, each from the values of all its fields: in a third of the time of calling it."""
    return map(partial(tuple.__new__, kind), fields)


class StepEngine(Protocol):
    """What the scheduler needs of an engine."""

    async def step(self, batch: Batch) -> StepOutput:
        """Run one step on the engine's own thread, after those that were given before it.

        May be called while earlier steps run, where the scheduler is told so (`max_steps_in_flight`). Where the step
        before failed for a row, that row's `PENDING` may be any token: nobody will read what follows.

        Raises:
            StepError: the batch's rows are lost, the engine lives on.
            EngineDead: no further step will succeed.
        """
