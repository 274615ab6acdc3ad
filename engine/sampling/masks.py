"""The first step: which tokens may not be drawn at all. Their logits become -inf, for the whole batch at once.

Four rules, each slot with its own: allowed token ids, bad words, no stop token before the minimum length, and the
grammar mask. Knows token ids and bit masks; nothing of words, regular expressions or schemas.
"""

import numpy as np
import torch
from torch import Tensor

from engine.batch import SlotStart
from engine.sampling.grammar import GrammarMasks, Words
from engine.sampling.state import Ints, SlotTable, flat_index, id_array, ints_on, on_rows
from engine.transit import upload

_BANNED = float("-inf")
_NONE: Ints = np.empty(0, dtype=np.int64)


def clear_bits(words: Words, token_ids: Ints) -> Words:
    """A copy of one mask [num_words] in which `token_ids` are not allowed."""
    cleared = words.view(np.uint32).copy()
    np.bitwise_and.at(cleared, token_ids >> 5, ~(np.uint32(1) << (token_ids & 31).astype(np.uint32)))
    return cleared.view(np.int32)


def unpack_bits(words: Tensor, vocab_size: int) -> Tensor:
    """Bit masks `words` [n, ceil(vocab / 32)] int32 -> bool [n, vocab]."""
    bits = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.view(torch.uint8).unsqueeze(-1)  # little-endian, as every host torch runs on
    return ((octets >> bits) & 1).flatten(-2)[:, :vocab_size].bool()


class TokenMasks:
    """The rules of every slot, and the output tails that bad words of several tokens are matched against."""

    def __init__(self, table: SlotTable, grammar: GrammarMasks, max_num_seqs: int) -> None:
        self._table = table
        self._grammar = grammar
        self._allowed: list[Ints] = [_NONE] * max_num_seqs
        self._has_allowed = np.zeros(max_num_seqs, dtype=np.bool_)
        self._banned: list[Ints] = [_NONE] * max_num_seqs
        self._has_banned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._stops: list[Ints] = [_NONE] * max_num_seqs
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._phrases: list[tuple[tuple[int, ...], ...]] = [()] * max_num_seqs
        self._tails: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def start(self, start: SlotStart) -> None:
        """Take over a new sequence's rules. Stop tokens outside the vocabulary can never come and are left out."""
        slot, params = start.slot, start.params
        self._has_allowed[slot] = params.allowed_token_ids is not None
        self._allowed[slot] = id_array(params.allowed_token_ids or ())
        self._stops[slot] = id_array(sorted(i for i in params.stop_token_ids if 0 <= i < self._table.vocab_size))
        self._min_tokens[slot] = params.min_tokens if len(self._stops[slot]) else 0
        self._banned[slot] = id_array(word[0] for word in params.bad_words_ids if len(word) == 1)
        self._phrases[slot] = tuple(word for word in params.bad_words_ids if len(word) > 1)
        self._has_banned[slot] = bool(params.bad_words_ids)
        self._tails[slot] = list(start.output_ids) if self._phrases[slot] else []

    def add(self, slot: int, token_id: int) -> None:
        """Remember one accepted output token."""
        if self._phrases[slot]:
            self._tails[slot].append(token_id)

    def apply(self, x: Tensor, slots: Ints) -> Tensor:
        """Ban tokens in logits `x` [n, vocab], contiguous, in place."""
        x = on_rows(x, slots, self._has_allowed[slots], self._keep_allowed)
        x = on_rows(x, slots, self._grammar.active[slots], self._keep_grammatical)
        too_short = self._table.num_outputs[slots] < self._min_tokens[slots]
        banning = self._has_banned[slots] | (too_short & ~self._grammar.active[slots])
        if banning.any():
            rows = np.flatnonzero(banning)
            banned = [self._banned_ids(slot) for slot in slots[rows]]
            x.view(-1)[ints_on(x.device, flat_index(rows, banned, x.shape[-1]))] = _BANNED
        return x

    def _keep_allowed(self, x: Tensor, slots: Ints) -> Tensor:
        """Rows `x` [n, vocab] with nothing but each slot's allowed tokens."""
        allowed = [self._allowed[slot] for slot in slots]
        index = ints_on(x.device, flat_index(np.arange(len(slots)), allowed, x.shape[-1]))
        kept = torch.full_like(x, _BANNED)
        kept.view(-1)[index] = x.view(-1)[index]
        return kept

    def _keep_grammatical(self, x: Tensor, slots: Ints) -> Tensor:
        """Rows `x` [n, vocab] with nothing but what each slot's grammar allows.

        The minimum length counts here only while the grammar can go on without a stop token: a complete answer cannot
        be made longer.
        """
        words = self._grammar.words(slots)
        for row in np.flatnonzero(self._table.num_outputs[slots] < self._min_tokens[slots]):
            longer = clear_bits(words[row], self._stops[slots[row]])
            if longer.any():
                words[row] = longer
        allowed = unpack_bits(upload(torch.from_numpy(words), x.device), x.shape[-1])
        return x.masked_fill_(~allowed, _BANNED)

    def _banned_ids(self, slot: int) -> Ints:
        """The slot's banned tokens by bad words and minimum length, for its next output token."""
        banned = [self._banned[slot]]
        if self._table.num_outputs[slot] < self._min_tokens[slot] and not self._grammar.active[slot]:
            banned.append(self._stops[slot])
        tail = self._tails[slot]
        ends = [word[-1] for word in self._phrases[slot] if tuple(tail[1 - len(word) :]) == word[:-1]]
        return np.concatenate((*banned, id_array(ends)))
