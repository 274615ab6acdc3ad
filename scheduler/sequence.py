"""One continuation of one prompt, and the group of continuations that answer one request. Mutable, private.

The whole state of progress is two numbers: `len(tokens)` and `computed`. Each step closes part of the gap between them:

    tokens    prompt ............................ | output ....... | draft
    KV        computed ..................... |<---------- gap ------------>|

A prefill chunk, a decode step, a prefix hit, a preempted sequence coming back and a verified draft differ only in how
large the gap is and how far a step moves `computed`. Both numbers change when a step is committed. What steps in flight
will change is counted beside them, so that the next step can be planned before:

    tokens    .................... | PENDING        num_pending: output tokens that steps in flight sample
    KV        computed | num_flying                 tokens that steps in flight compute

Knows token ids and its own blocks; decides nothing.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.batch import PENDING, Row, SlotStart
from kvpool.table import BlockTable
from scheduler.handle import RequestHandle
from scheduler.request import FinishReason, Request

Order = tuple[int, int, int]
"""Place in the policy's order, smaller first: (priority, arrival, choice). Unique among live sequences."""

NO_SLOT = -1


class SequenceState(Enum):
    """Where a sequence is. HELD and WAITING hold no blocks; ENDED ones lose theirs once no step can write them."""

    HELD = auto()  # a further choice, until the prompt has been computed once
    WAITING = auto()  # in the queue: new, or preempted
    RUNNING = auto()  # owns a slot and a table
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Contents of consecutive blocks, from block number `first` on, read for a sequence that waits."""

    first: int
    data: tuple[bytes, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request.

    Attributes:
        tokens: prompt and accepted output tokens.
        computed: how many of `tokens` have KV in the pool.
        num_flying: tokens after them that steps in flight compute; not 0 exactly while it has a row in flight.
        num_pending: output tokens that steps in flight sample: it will be that much longer.
        draft: unverified tokens proposed to follow `tokens`.
        is_drafting: its last step proposed a draft: how far its next one gets is known only when it is done.
        table: its blocks; empty unless it is running.
        slot: its row of engine state, `NO_SLOT` unless it is running.
        num_synced: leading table entries that the engine's slot already knows.
        digests: prefix digests of its full blocks, as far as they were needed.
        num_published: leading blocks already offered to the prefix index.
        num_reserved: tokens that its table has room for in advance; 0 grows a block at a time.
        num_preemptions: how often it lost its blocks.
        fetched: what a tier gave for its next entry; None when it was not asked.
        last_token_s: when its newest output token was committed.
    """

    group: "Group"
    request: Request
    choice: int
    order: Order
    tokens: list[int]
    table: BlockTable
    state: SequenceState = SequenceState.HELD
    computed: int = 0
    num_flying: int = 0
    num_pending: int = 0
    draft: tuple[int, ...] = ()
    is_drafting: bool = False
    slot: int = NO_SLOT
    num_synced: int = 0
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_reserved: int = 0
    num_preemptions: int = 0
    fetched: Fetched | None = None
    last_token_s: float | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Accepted output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Output tokens that may still follow."""
        return self.request.max_tokens - self.num_output

    @property
    def num_longest(self) -> int:
        """Tokens whose KV it can ever need: all but the last one it may give."""
        return self.num_prompt + max(0, self.request.max_tokens - 1)

    @property
    def gap(self) -> int:
        """Tokens that could be computed now, the draft included."""
        return len(self.tokens) + len(self.draft) - self.computed

    @property
    def num_planned(self) -> int:
        """How many tokens have KV in the pool once the steps in flight are done."""
        return self.computed + self.num_flying

    @property
    def num_ready(self) -> int:
        """Tokens that the next step may compute, after those in flight. None when these give the last output."""
        if self.num_pending and self.num_left <= self.num_pending:
            return 0
        return len(self.tokens) + self.num_pending + len(self.draft) - self.computed - self.num_flying

    @property
    def is_caught_up(self) -> bool:
        """Whether only the newest token (and a draft) is left to compute: the next step gives output."""
        return self.num_planned >= len(self.tokens) + self.num_pending - 1

    @property
    def is_prompt_computed(self) -> bool:
        """Whether the KV of the whole prompt is in its blocks."""
        return self.computed >= self.num_prompt

    @property
    def is_missing_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were asked for and some are still to come: the prompt must then be computed."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and len(self.group.handle.prompt_logprobs) < self.num_prompt - 1

    def span(self, num_tokens: int) -> tuple[int, ...]:
        """The next `num_tokens` tokens to compute."""
        if self.num_pending:
            assert num_tokens == 1, "nothing is known of what follows a pending token"
            return (PENDING,)
        start = self.computed + self.num_flying
        accepted = tuple(self.tokens[start : start + num_tokens])
        return accepted + self.draft[: num_tokens - len(accepted)] if self.draft else accepted

    def prompt_targets(self, num_tokens: int) -> tuple[int, ...]:
        """The prompt tokens after each of the next `num_tokens` ones, while prompt logprobs are still to come."""
        if not self.is_missing_prompt_logprobs:
            return ()
        return self.request.prompt_ids[self.num_planned + 1 : self.num_planned + 1 + num_tokens]

    def slot_start(self) -> SlotStart:
        """What the engine must remember about it while it runs."""
        request = self.request
        return SlotStart(
            slot=self.slot,
            params=request.sampling,
            choice=self.choice,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(self.tokens[self.num_prompt :]),
            constraint=request.constraint,
        )

    def take_off(self, row: Row) -> None:
        """A step with this row of it will be in flight."""
        self.num_flying += len(row.token_ids)
        self.num_pending += row.sample

    def land(self, row: Row) -> None:
        """That step is done, well or not; what it gave is not yet part of the sequence."""
        self.num_flying -= len(row.token_ids)
        self.num_pending -= row.sample

    def advance(self, token_ids: tuple[int, ...], num_computed: int) -> None:
        """Append accepted `token_ids` after a step that computed `num_computed` tokens that were accepted before it.

        All but the last of `token_ids` are verified drafts: the step computed them as well.
        """
        self.tokens.extend(token_ids)
        self.computed += num_computed + max(0, len(token_ids) - 1)
        self.draft = ()

    def reset(self) -> None:
        """Forget all progress but the tokens: its blocks and slot are gone."""
        assert not self.num_flying, "a step in flight still computes tokens of it"
        self.computed = self.num_synced = self.num_published = self.num_reserved = 0
        self.draft = ()
        self.is_drafting = False
        self.slot = NO_SLOT


@dataclass(eq=False, slots=True)
class Group:
    """The choices of one accepted request, and what is counted over them. `arrival` numbers the requests."""

    handle: RequestHandle
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    num_output_tokens: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether any of it was ever part of a step."""
        return self.handle.times.scheduled_s is not None

    @property
    def is_active(self) -> bool:
        """Whether any choice waits or runs."""
        return any(s.state in (SequenceState.WAITING, SequenceState.RUNNING) for s in self.sequences)

    def held(self) -> list[Sequence]:
        """Choices still held back, in order."""
        return [s for s in self.sequences if s.state is SequenceState.HELD]

    def forkable(self) -> Sequence | None:
        """A running choice whose blocks hold the whole prompt, if there is one."""
        running = (s for s in self.sequences if s.state is SequenceState.RUNNING)
        return next((s for s in running if s.is_prompt_computed), None)
