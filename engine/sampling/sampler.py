"""The sampler: everything a slot remembers about choosing tokens, and the step that chooses them.

Knows slots, logits and token ids; nothing of requests, text or attention. State advances only on tokens it returned,
and `start` rebuilds it from the tokens a sequence already has, so a preempted sequence continues as if nothing had
happened.

A step is drawn on the device and concluded on the host, where its numbers come later. What a slot drew last stays on
the device, for the next step to begin with (`fill_in`). What it remembers of its output (penalties, grammar, bad words)
is the host's, and must be concluded before it draws again; most slots remember nothing (`remembers`).
"""

from collections.abc import Collection, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import RowOutput, SlotStart, TokenLogprob, tuples_of
from engine.errors import NO_TOKEN_LEFT
from engine.sampling.grammar import GrammarMasks
from engine.sampling.logprobs import Described, describe
from engine.sampling.masks import TokenMasks
from engine.sampling.native_race import best_race
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import LogitBias, Penalties
from engine.sampling.pipeline import Outcome, Pipeline, highest
from engine.sampling.race import Race
from engine.sampling.state import Ints, SlotTable, ints_on, put

_REASONS = {
    Outcome.BROKEN: "the model computed logits that are not finite numbers",
    Outcome.EMPTY: NO_TOKEN_LEFT,
}
_NOBODY: Ints = np.empty(0, dtype=np.int64)
_NOTHING_MORE = tuple(repeat(field) for field in RowOutput()[1:])
"""Every field of a plain row's output but its tokens, as often as it is asked for."""


REPORTED, REMEMBERS, EDITED, DRAWN = 1, 2, 4, 8
"""What a slot asks for beyond its highest raw logit, as bits: logprobs; edits that depend on what it has chosen before;
edits of any kind; a draw. A step in which no slot asks for anything is short."""


class Drawn(NamedTuple):
    """What `slots` [n] drew, on the device: `chosen` [2, n] (see `Pipeline.choose`), and for those of the `reported`
    rows what their logprobs will be read from. `traits` are those of any slot."""

    slots: Ints
    traits: int
    chosen: Tensor
    reported: Ints
    described: Described | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What must come to the host for `Sampler.conclude`, wider element types first."""
        return (self.chosen,) if self.described is None else (self.chosen, self.described.numbers)


class Sampler:
    """Per-slot sampling state for `max_num_seqs` slots, and vectorised sampling over any of them.

    Args:
        max_num_seqs: number of slots.
        vocab_size: width of the logits.
        device: where the logits are.
        race: how to draw; None for the best that the device has.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, *, race: Race | None = None) -> None:
        assert vocab_size < 2**24, "token ids are exact in float32"
        self.vocab_size = vocab_size
        self.device = device
        self._table = SlotTable(max_num_seqs, vocab_size)
        self._grammar = GrammarMasks(max_num_seqs, vocab_size)
        self._masks = TokenMasks(self._table, self._grammar, max_num_seqs)
        self._bias = LogitBias(max_num_seqs)
        self._penalties = Penalties(self._table, max_num_seqs)
        race = best_race(device) if race is None else race
        self._pipeline = Pipeline(self._table, self._masks, self._bias, self._penalties, race)
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._traits = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_top = np.zeros(max_num_seqs, dtype=np.int64)
        self._extra_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def start(self, start: SlotStart) -> None:
        """Give a slot to a sequence: forget the one before, replay `output_ids`.

        A constraint that fails here fails the slot's next row.

        Raises:
            ValueError: a token id outside the vocabulary, named; the slot is as it was.
        """
        self._check(start)
        slot, params = start.slot, start.params
        self._table.start(start)
        self._masks.start(start)
        self._bias.start(slot, params.logit_bias)
        self._penalties.start(start)
        self._grammar.start(slot, start.constraint, start.output_ids)
        self._num_top[slot] = params.logprobs or 0
        self._extra_ids[slot] = params.logprob_token_ids
        self._traits[slot] = self._traits_of(slot, params)

    def begin(self, slots: Sequence[int] | Ints) -> None:
        """Start computing the grammar masks of the slots that will sample in this step, beside the forward pass."""
        if self._any_traits(slots) & REMEMBERS:
            self._grammar.begin(slots)

    def remembers(self, slots: Sequence[int] | Ints) -> bool:
        """Whether what any of them may draw depends on the tokens it drew: all of these must be concluded before."""
        return bool(self._any_traits(slots) & REMEMBERS)

    def fill_in(self, token_ids: Tensor) -> Tensor:
        """Token ids [n] in which `-1 - slot` stood for the token that the slot drew last. Waits for no device."""
        return torch.where(token_ids < 0, self._last[(-1 - token_ids).clamp_(min=0)], token_ids)

    @torch.inference_mode()
    def sample(self, slots: Sequence[int], logits: Tensor) -> list[RowOutput]:
        """Choose the next token of each slot and advance its state: `draw`, concluded at once."""
        if not slots:
            return []
        drawn = self.draw(slots, logits)
        return self.conclude(drawn, drawn.tensors)

    def draw(self, slots: Sequence[int] | Ints, logits: Tensor) -> Drawn:
        """Choose the next token of each slot on the device, which may have to work on it for some time.

        Args:
            slots: [n] distinct, at least one.
            logits: [n, vocab_size] raw, row `i` for `slots[i]`; overwritten when float32 and contiguous.
        """
        assert logits.shape == (len(slots), self.vocab_size), "one row of logits for each slot"
        rows = np.asarray(slots, dtype=np.int64)
        traits = self._any_traits(rows)
        if traits & REMEMBERS:
            self._grammar.join(rows.tolist())
        logits = logits.float().contiguous()
        reported = np.flatnonzero(self._traits[rows] & REPORTED) if traits & REPORTED else _NOBODY
        index = ints_on(logits.device, reported) if reported.size else None
        raw = None if index is None else logits[index]  # a copy, before the steps edit them
        if traits & (EDITED | DRAWN):
            chosen = self._pipeline.choose(logits, rows, are_edited=bool(traits & EDITED))
        else:
            chosen = highest(logits)
        described = None if raw is None else self._describe(raw, chosen[0][index], rows[reported])
        put(self._last, rows, chosen[0])
        self._table.num_outputs[rows] += 1
        return Drawn(rows, traits, chosen, reported, described)

    def conclude(self, drawn: Drawn, tensors: Sequence[Tensor]) -> list[RowOutput]:
        """What a draw came to, from its `tensors` on the host, in order of drawing. What slots remember advances."""
        token_ids, outcomes = tensors[0].tolist()
        if not (drawn.traits & (REPORTED | REMEMBERS) or any(outcomes)):
            ones = zip(token_ids)  # tuples of one token
            return list(tuples_of(RowOutput, zip(ones, *_NOTHING_MORE, strict=False)))
        logprobs: dict[int, TokenLogprob] = {}
        if drawn.described is not None:
            logprobs = dict(zip(drawn.reported.tolist(), drawn.described.read(tensors[1]), strict=True))
        return [
            self._conclude(slot, token_id, outcome, logprobs.get(row))
            for row, (slot, token_id, outcome) in enumerate(zip(drawn.slots.tolist(), token_ids, outcomes, strict=True))
        ]

    def close(self) -> None:
        """End the side thread that computes grammar masks."""
        self._grammar.close()

    def _describe(self, raw: Tensor, token_ids: Tensor, slots: Ints) -> Described:
        return describe(raw, token_ids, self._num_top[slots].tolist(), [self._extra_ids[slot] for slot in slots])

    def _any_traits(self, slots: Sequence[int] | Ints) -> int:
        return int(np.bitwise_or.reduce(self._traits[np.asarray(slots, dtype=np.int64)]))

    def _traits_of(self, slot: int, params: SamplingParams) -> int:
        """The bits of a slot that has just started."""
        is_reported = params.logprobs is not None or bool(params.logprob_token_ids)
        remembers = bool(self._penalties.active[slot] or self._grammar.active[slot] or params.bad_words_ids)
        is_limited = params.allowed_token_ids is not None or params.min_tokens > 0
        is_edited = remembers or is_limited or bool(params.logit_bias)
        return REPORTED * is_reported | REMEMBERS * remembers | EDITED * is_edited | DRAWN * (not params.is_greedy)

    def _conclude(self, slot: int, token_id: int, outcome: int, logprob: TokenLogprob | None) -> RowOutput:
        """Advance what the slot remembers of its output; or say why its row failed."""
        error = self._grammar.errors.get(slot) or _REASONS.get(Outcome(outcome))
        if error is not None:
            return RowOutput(error=error)
        logprobs = () if logprob is None else (logprob,)
        if not self._traits[slot] & REMEMBERS:
            return RowOutput((token_id,), logprobs)
        if not self._grammar.accept(slot, (token_id,)):
            return RowOutput(error=self._grammar.errors[slot])
        self._penalties.add(slot, token_id)
        self._masks.add(slot, token_id)
        return RowOutput((token_id,), logprobs, stopped=self._grammar.is_stopped(slot))

    def _check(self, start: SlotStart) -> None:
        """ValueError for the first token id that is outside the vocabulary."""
        params = start.params
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", params.logprob_token_ids)
        for word in params.bad_words_ids:
            self._check_ids("bad_words", word)
        self._check_ids("the prompt", start.prompt_ids)
        self._check_ids("the output", start.output_ids)

    def _check_ids(self, where: str, token_ids: Collection[int]) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        outside = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
        raise ValueError(f"token id {outside} in {where} is outside the vocabulary of {self.vocab_size}")
