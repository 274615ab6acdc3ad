"""A step engine without a model: it emulates the paged KV memory, token by token, and trusts nobody.

Each cell of each block holds the token written there and a digest of the whole prefix up to it, as real KV would. The
next token is a hash of what the row can *see through its block table*, so a wrong table, a missed copy, a block freed
too early or a stale prefix hit changes the tokens or fails an assertion. `reference_tokens` says, without any memory,
what a request must answer.
"""

import asyncio
import hashlib
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch import PENDING, Batch, Row, RowOutput, SlotStart, StepOutput, TokenLogprob
from engine.sampling.params import SamplingParams
from scheduler.request import Request
from tests.fakes.clock import VirtualClock

ROOT = b"root"
UNKNOWN = -1


def extend(prefix: bytes, token_id: int) -> bytes:
    """The digest of a prefix, one token longer."""
    return hashlib.blake2b(prefix + token_id.to_bytes(8, "little", signed=True), digest_size=16).digest()


def digest_of(token_ids: Sequence[int]) -> bytes:
    prefix = ROOT
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
    return prefix


def next_token(prefix: bytes, params: SamplingParams, choice: int, num_output: int, vocab_size: int) -> int:
    """The token after `prefix`: decided by (prefix, seed, choice, index of the output token) alone."""
    key = b"%d,%d,%d" % (params.seed, choice, num_output)
    token_id = int.from_bytes(hashlib.blake2b(prefix + key, digest_size=4).digest(), "little") % vocab_size
    while num_output < params.min_tokens and token_id in params.stop_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def reference_tokens(request: Request, choice: int = 0, vocab_size: int = 97) -> list[int]:
    """What choice `choice` of `request` must answer, up to its stop token or `max_tokens`."""
    prefix, output = digest_of(request.prompt_ids), list[int]()
    while len(output) < request.max_tokens:
        token_id = next_token(prefix, request.sampling, choice, len(output), vocab_size)
        output.append(token_id)
        if token_id in request.sampling.stop_token_ids and len(output) > request.sampling.min_tokens:
            break
        prefix = extend(prefix, token_id)
    return output


@dataclass
class Slot:
    """What the engine remembers of the sequence in a slot."""

    start: SlotStart
    output_ids: list[int]
    table: list[int] = field(default_factory=list)
    is_void: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [*self.start.prompt_ids, *self.output_ids]


@dataclass
class FakeEngine:
    """A `StepEngine` with knobs.

    What it finds wrong with a batch is raised, and kept in `problems` for a test to see.

    Attributes:
        latency_s, token_latency_s: moved on the virtual clock each step, and for each of its tokens.
        num_drafts: proposes that many tokens per row, every third of which is wrong.
        fail: called with each batch; may raise what the step raises.
        row_error, row_stopped: called with (row, tokens sampled); may fail or complete that row.
        gate: when set, each step waits for it after its work is done.
        max_in_flight: steps that may be given before the first of them is done. They run in order.
        whims: when set, each step begins, and tells that it is done, some random turns of the event loop late. So it
            has often long run, and others behind it, when its output comes.

    A slot whose step was lost, or whose row failed, is void: what follows in it computes nonsense, and writes it, until
    the slot is started anew.
    """

    num_blocks: int
    block_size: int
    vocab_size: int = 97
    clock: VirtualClock | None = None
    latency_s: float = 0.0
    token_latency_s: float = 0.0
    num_drafts: int = 0
    fail: Callable[[Batch], None] | None = None
    row_error: Callable[[Row, list[int]], str | None] | None = None
    row_stopped: Callable[[Row, list[int]], bool] | None = None
    gate: asyncio.Event | None = None
    batches: list[Batch] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    memory: dict[int, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    max_in_flight: int = 1
    whims: random.Random | None = None
    num_in_flight: int = 0
    most_in_flight: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    async def step(self, batch: Batch) -> StepOutput:
        assert self.num_in_flight < self.max_in_flight, "too many steps in flight"
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        before, self._last = self._last, asyncio.Event()
        ran = self._last
        try:
            self.batches.append(batch)
            try:
                await self._turns()
                await before.wait()
                output = self._run_now(batch)
            finally:
                ran.set()
            await self._turns()
            if self.gate is not None:
                await self.gate.wait()
            if self.clock is not None:
                self.clock.advance(self._duration_s(batch))
            return output
        finally:
            self.num_in_flight -= 1

    def __post_init__(self) -> None:
        self._last = asyncio.Event()
        self._last.set()

    @property
    def in_flight(self) -> bool:
        return self.num_in_flight > 0

    async def _turns(self) -> None:
        for _ in range(1 if self.whims is None else self.whims.choice([1, 1, 2, 5, 13])):
            await asyncio.sleep(0)

    def _run_now(self, batch: Batch) -> StepOutput:
        try:
            if self.fail is not None:
                self.fail(batch)
            return self.step_sync(batch)
        except AssertionError as problem:
            self.problems.append(str(problem))
            raise
        except Exception:
            self._lose(batch)
            raise

    def _lose(self, batch: Batch) -> None:
        """The step did nothing: what its slots hold from now on means nothing."""
        for start in batch.starts:
            self.slots[start.slot] = Slot(start, [])
        for row in batch.rows:
            self.slots[row.slot].is_void = True

    def step_sync(self, batch: Batch) -> StepOutput:
        assert batch.rows or batch.saves, "an empty batch"
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "a slot has two rows"
        for start in batch.starts:
            self.slots[start.slot] = Slot(start, list(start.output_ids))
        saved = tuple(pickle.dumps(self.memory[block_id]) for block_id in batch.saves)
        for load in batch.loads:
            self.memory[load.block_id] = pickle.loads(load.data)
        for copy in batch.copies:
            self.memory[copy.target_id] = dict(self.memory.get(copy.source_id, {}))
        self._write_all(batch.rows)
        return StepOutput(batch.step, tuple(self._run(row) for row in batch.rows), self._duration_s(batch), saved)

    def _duration_s(self, batch: Batch) -> float:
        return self.latency_s + self.token_latency_s * batch.num_tokens

    def _write_all(self, rows: Sequence[Row]) -> None:
        written: dict[int, int] = {}
        for row in rows:
            slot = self.slots[row.slot]
            if not slot.is_void:
                assert row.block_offset <= len(slot.table), "a table update leaves a hole"
            slot.table[len(slot.table) :] = [UNKNOWN] * (row.block_offset - len(slot.table))
            slot.table[row.block_offset :] = row.block_ids
            if not slot.is_void:
                assert len(set(slot.table)) == len(slot.table), "a table holds a block twice"
                self._check_tokens(row, slot)
            for position, token_id in enumerate(self._token_ids(row), row.start):
                block_id = slot.table[position // self.block_size]
                if block_id == UNKNOWN:
                    continue  # of a lost step
                assert 0 <= block_id < self.num_blocks
                assert written.setdefault(block_id, row.slot) == row.slot, f"two rows write block {block_id}"
                if slot.is_void:
                    self.memory.setdefault(block_id, {})[position % self.block_size] = (token_id, b"nonsense")
                    continue
                prefix = self._cell(slot, position - 1)[1] if position else ROOT
                cells = self.memory.setdefault(block_id, {})
                cells[position % self.block_size] = (token_id, extend(prefix, token_id))

    def _check_tokens(self, row: Row, slot: Slot) -> None:
        known = slot.token_ids
        end = row.start + len(row.token_ids) - row.num_drafts
        assert row.token_ids, "a row computes nothing"
        assert PENDING not in row.token_ids[1:], "two tokens pending"
        assert list(self._token_ids(row)[: end - row.start]) == known[row.start : end], (
            "a row holds other tokens than its slot"
        )
        assert not row.sample or end == len(known), "a row samples in the middle of its sequence"
        assert not row.num_drafts or row.sample, "drafts behind a gap"

    def _token_ids(self, row: Row) -> tuple[int, ...]:
        """The row's tokens, with the one that its slot sampled in the step before."""
        if row.token_ids[0] != PENDING:
            return row.token_ids
        output_ids = self.slots[row.slot].output_ids
        return (output_ids[-1] if output_ids else 0, *row.token_ids[1:])

    def _run(self, row: Row) -> RowOutput:
        slot = self.slots[row.slot]
        if slot.is_void:
            return RowOutput(token_ids=(0,) if row.sample else ())
        self._check_memory(row, slot)
        prompt_logprobs = tuple(
            TokenLogprob(target, -float(position + 1), 1)
            for position, target in enumerate(row.prompt_targets, row.start)
        )
        if prompt_logprobs:
            prompt = slot.start.prompt_ids
            assert row.prompt_targets == prompt[row.start + 1 : row.start + 1 + len(row.token_ids)], "wrong targets"
        if not row.sample:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        accepted = self._sample(row, slot)
        error = self.row_error(row, accepted) if self.row_error else None
        if error is not None:
            slot.is_void = True
            return RowOutput(error=error)
        slot.output_ids += accepted
        return RowOutput(
            token_ids=tuple(accepted),
            logprobs=self._logprobs(slot, accepted),
            prompt_logprobs=prompt_logprobs,
            draft=self._propose(slot),
            stopped=self.row_stopped(row, accepted) if self.row_stopped else False,
        )

    def _check_memory(self, row: Row, slot: Slot) -> None:
        """Everything the row attends to must be the KV of exactly its own tokens."""
        end = row.start + len(row.token_ids)
        prefix, known = ROOT, (slot.token_ids[: row.start] + list(self._token_ids(row)))[:end]
        for position, token_id in enumerate(known):
            prefix = extend(prefix, token_id)
            assert self._cell(slot, position) == (token_id, prefix), (
                f"position {position} holds the KV of another prefix"
            )

    def _sample(self, row: Row, slot: Slot) -> list[int]:
        """Verify the drafts one by one; the first token that differs, or follows them all, is the sampled one."""
        end, accepted = row.start + len(row.token_ids), list[int]()
        params, choice = slot.start.params, slot.start.choice
        for position in range(end - row.num_drafts - 1, end):
            prefix, num_output = self._cell(slot, position)[1], len(slot.output_ids) + len(accepted)
            accepted.append(next_token(prefix, params, choice, num_output, self.vocab_size))
            if position + 1 < end and self._cell(slot, position + 1)[0] != accepted[-1]:
                break
        return accepted

    def _propose(self, slot: Slot) -> tuple[int, ...]:
        prefix, draft = digest_of(slot.token_ids), list[int]()
        for _ in range(self.num_drafts):
            num_output = len(slot.output_ids) + len(draft)
            token_id = next_token(prefix, slot.start.params, slot.start.choice, num_output, self.vocab_size)
            draft.append((token_id + (num_output % 3 == 2)) % self.vocab_size)
            prefix = extend(prefix, draft[-1])
        return tuple(draft)

    def _logprobs(self, slot: Slot, accepted: list[int]) -> tuple[TokenLogprob, ...]:
        if slot.start.params.logprobs is None:
            return ()
        return tuple(TokenLogprob(token_id, -1.0, 1) for token_id in accepted)

    def _cell(self, slot: Slot, position: int) -> tuple[int, bytes]:
        return self.memory[slot.table[position // self.block_size]][position % self.block_size]
