"""The last steps of the default order, top-k, top-p, min-p and the draw, without sorting the vocabulary.

Three ways to the same token, chosen for each row by its own settings, so that its neighbours never matter:

    small top-k     the k highest are looked at, nothing else
    top-p, large k  all run; a winner that these settings drop is replaced by the winner among those ahead of it
    neither         all run

The second way is exact because each of these steps keeps the first so many in order of likelihood: if the winner is
kept, it has won among the kept as well; if not, nothing behind it is kept either.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import truncation
from engine.sampling.race import Border, Race
from engine.sampling.rng import Keys
from engine.sampling.state import Flags, Floats, Ints, floats_on, ints_on

MAX_SMALL_K = 1024
"""Up to this top-k a row's candidates are picked out first."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Settings of the last steps, one per row [n]: 0 is no top-k, 1 no top-p, 0 no min-p; `keys` [n, 2] of the race."""

    top_k: Ints
    top_p: Floats
    min_p: Floats
    keys: Keys

    def take(self, rows: Ints) -> "Cut":
        """Some of the rows."""
        return Cut(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows])


def truncate_and_draw(x: Tensor, cut: Cut, race: Race) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p to logits `x` [n, vocab], and draw.

    Returns:
        token ids [n], and each row's highest logit [n]: not finite where there was nothing to draw from.
    """
    small = (cut.top_k > 0) & (cut.top_k <= MAX_SMALL_K)
    limited = ~small & ((cut.top_k > 0) | (cut.top_p < 1.0))
    return _by_rows(x, cut, race, ((small, _from_few), (limited, _from_limited), (~small & ~limited, _from_all)))


_Way = Callable[[Tensor, Cut, Race], tuple[Tensor, Tensor]]


def _by_rows(x: Tensor, cut: Cut, race: Race, ways: tuple[tuple[Flags, _Way], ...]) -> tuple[Tensor, Tensor]:
    """Send each row [n] to the one way whose flags hold it, and put the answers back in order."""
    tokens = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    peaks = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    for flags, way in ways:
        if flags.all():
            return way(x, cut, race)
        if flags.any():
            rows = np.flatnonzero(flags)
            index = ints_on(x.device, rows)
            tokens[index], peaks[index] = way(x[index], cut.take(rows), race)
    return tokens, peaks


def _from_few(x: Tensor, cut: Cut, race: Race) -> tuple[Tensor, Tensor]:
    width = int(cut.top_k.max())
    candidates, ids = truncation.narrow(x, width)
    if (cut.top_k < width).any():
        candidates = truncation.top_k(candidates, ints_on(x.device, cut.top_k), width)
    if (cut.top_p < 1.0).any():
        candidates = truncation.top_p(candidates, floats_on(x.device, cut.top_p))
    if (cut.min_p > 0.0).any():
        candidates = truncation.min_p(candidates, floats_on(x.device, cut.min_p))
    return race.winners(candidates, cut.keys, ids=ids)


def _from_all(x: Tensor, cut: Cut, race: Race) -> tuple[Tensor, Tensor]:
    """All but what min-p drops: that needs no sum, only the highest logit."""
    if not (cut.min_p > 0.0).any():
        return race.winners(x, cut.keys)
    floors = truncation.min_p_floor(x, floats_on(x.device, cut.min_p))
    everyone_there = torch.full((len(x),), x.shape[-1], dtype=torch.int64, device=x.device)
    return race.winners(x, cut.keys, border=Border(floors, everyone_there))


def _from_limited(x: Tensor, cut: Cut, race: Race) -> tuple[Tensor, Tensor]:
    if ((cut.top_k > 0) & (cut.top_p < 1.0)).any():  # top-p is a share of what top-k leaves
        limits = _limits(x, cut)
        x = truncation.top_k(x, ints_on(x.device, limits), int(limits.max()))
    tokens, peaks = _from_all(x, cut, race)
    return _within_limits(x, cut, race, tokens), peaks


def _within_limits(x: Tensor, cut: Cut, race: Race, tokens: Tensor) -> Tensor:
    """`tokens` [n] themselves where top-k and top-p keep them; elsewhere the winner among what these keep.

    Few rounds: what is ahead of a winner shrinks by half or so each time, and the most likely token is always kept.
    """
    border = Border.at(x, tokens)
    counts, shares = race.ahead(x, border)
    outside = (counts >= ints_on(x.device, _limits(x, cut))) | (shares >= floats_on(x.device, cut.top_p))
    rows = np.flatnonzero(outside.cpu().numpy())  # the one question that a draw has for the device
    if rows.size:
        index = ints_on(x.device, rows)
        x, cut, border = x[index], cut.take(rows), border.take(index)
        again, _ = race.winners(x, cut.keys, border=border)
        tokens[index] = _within_limits(x, cut, race, again)
    return tokens


def _limits(x: Tensor, cut: Cut) -> Ints:
    """How many tokens top-k keeps of each row, [n]."""
    return np.where(cut.top_k > 0, cut.top_k, x.shape[-1])
