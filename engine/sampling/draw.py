"""The last steps of the default order, top-k, top-p, min-p and the draw, over as few candidates as the rows allow.

Three ways to the same answer, chosen for each row by its own settings, so that its neighbours never matter:

    small top-k         the k highest are looked at, nothing else
    top-p, no top-k     the few highest that hold the nucleus; more when they do not
    anything else       the whole vocabulary

Every way draws in ascending order of token id, from one uniform number per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import truncation
from engine.sampling.state import Flags, Floats, Ints, floats_on, ints_on

MAX_SMALL_K = 1024
"""Up to this top-k a row's candidates are found without a sort."""

NUCLEUS_WIDTHS = (64, 512, 4096)
"""How many of the most likely tokens are tried in turn as holding a nucleus, before sorting the vocabulary."""

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """Settings of the last steps, one per row [n]: 0 is no top-k, 1 no top-p, 0 no min-p; `uniform` inside (0, 1)."""

    top_k: Ints
    top_p: Floats
    min_p: Floats
    uniform: Floats

    def take(self, rows: Ints) -> "Cut":
        """Some of the rows."""
        return Cut(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


def truncate_and_draw(x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p to logits `x` [n, vocab], and draw.

    Returns:
        token ids [n], and each row's highest remaining logit [n]: not finite where there was nothing to draw from.
    """
    small = (cut.top_k > 0) & (cut.top_k <= MAX_SMALL_K)
    nucleus = (cut.top_k == 0) & (cut.top_p < 1.0) & (x.shape[-1] > NUCLEUS_WIDTHS[0])
    ways = ((small, _from_small), (nucleus, _from_nucleus), (~small & ~nucleus, _from_all))
    return _by_rows(x, cut, ways)


_Way = Callable[[Tensor, Cut], tuple[Tensor, Tensor]]


def _by_rows(x: Tensor, cut: Cut, ways: tuple[tuple[Flags, _Way], ...]) -> tuple[Tensor, Tensor]:
    """Send each row [n] to the one way whose flags hold it, and put the answers back in order."""
    tokens = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    peaks = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    for flags, way in ways:
        if flags.all():
            return way(x, cut)
        if flags.any():
            rows = np.flatnonzero(flags)
            index = ints_on(x.device, rows)
            tokens[index], peaks[index] = way(x[index], cut.take(rows))
    return tokens, peaks


def _from_small(x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    width = int(cut.top_k.max())
    candidates, ids = truncation.narrow(x, width)
    if (cut.top_k < width).any():
        candidates = truncation.top_k(candidates, ints_on(x.device, cut.top_k))
    return _finish(_nucleus(candidates, cut), ids, cut)


def _from_nucleus(x: Tensor, cut: Cut, widths: tuple[int, ...] = NUCLEUS_WIDTHS) -> tuple[Tensor, Tensor]:
    """Look at the `widths[0]` most likely tokens; rows whose nucleus is larger go on to the next width."""
    if not widths or widths[0] >= x.shape[-1]:
        return _from_all(x, cut)
    p = floats_on(x.device, cut.top_p)
    candidates, ids = truncation.narrow(x, widths[0])
    peak = candidates.amax(-1, keepdim=True)
    total = (x - peak).exp_().sum(-1, dtype=p.dtype)
    held = (candidates - peak).exp_().sum(-1, dtype=p.dtype) >= p * total
    tokens, peaks = _finish(truncation.top_p(candidates, p, total), ids, cut)
    if not held.all():
        index = (~held).nonzero().squeeze(-1)
        tokens[index], peaks[index] = _from_nucleus(x[index], cut.take(index.cpu().numpy()), widths[1:])
    return tokens, peaks


def _from_all(x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    if (cut.top_k > 0).any():
        k = np.where(cut.top_k > 0, cut.top_k, x.shape[-1])
        x = truncation.top_k(x, ints_on(x.device, k))
    return _finish(_nucleus(x, cut), None, cut)


def _nucleus(x: Tensor, cut: Cut) -> Tensor:
    if not (cut.top_p < 1.0).any():
        return x
    return truncation.top_p(x, floats_on(x.device, cut.top_p))


def _finish(x: Tensor, ids: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor]:
    """Min-p and the draw over candidates `x` [n, width] with token ids `ids` (None: the columns themselves)."""
    if (cut.min_p > 0.0).any():
        x = truncation.min_p(x, floats_on(x.device, cut.min_p))
    columns, peaks = draw(x, floats_on(x.device, cut.uniform))
    if ids is not None:
        columns = ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    return columns, peaks


def draw(x: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of logits `x` [n, width] at `uniform` [n], inside (0, 1).

    In two levels, chunks of columns and then columns, so that only one chunk is ever summed token by token. A column of
    probability zero is never drawn.

    Returns:
        columns [n] and the highest logit of each row [n]. Where that is not finite the column means nothing (but is
        one of the row).
    """
    peaks = x.amax(-1)
    weights = (x - peaks.unsqueeze(-1)).exp_()
    chunks = _chunk_sums(weights, uniform.dtype)
    chunk, rest = _invert(chunks, uniform * chunks.sum(-1))
    last = x.shape[-1] - 1
    columns = chunk.unsqueeze(-1) * _CHUNK + torch.arange(min(_CHUNK, last + 1), device=x.device)
    inside = weights.gather(-1, columns.clamp(max=last)).to(uniform.dtype)
    column, _ = _invert(inside.masked_fill_(columns > last, 0.0), rest)
    return (chunk * _CHUNK + column).clamp_(max=last), peaks


def _chunk_sums(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums [n, num_chunks] of `weights` [n, width] over `_CHUNK` columns each, the last one maybe fewer."""
    whole = weights.shape[-1] // _CHUNK * _CHUNK
    sums = weights[:, :whole].reshape(len(weights), whole // _CHUNK, _CHUNK).sum(-1, dtype=dtype)
    if whole == weights.shape[-1]:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True, dtype=dtype)), dim=-1)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first column of `weights` [n, width] whose running sum exceeds `target` [n], and what is left of it there.

    Columns of weight zero are passed over even where a parallel sum rounds upwards at them, and a target that rounding
    put at or above the whole sum counts as just below it. So the column found has weight, if any has.
    """
    sums = weights.cumsum(-1)
    reached = sums.masked_fill(weights <= 0, -1.0)
    target = torch.minimum(target, torch.nextafter(reached.amax(-1), torch.zeros_like(target)))
    column = (reached > target.unsqueeze(-1)).to(torch.uint8).argmax(-1, keepdim=True)
    before = sums.gather(-1, column) - weights.gather(-1, column)
    return column.squeeze(-1), (target - before.squeeze(-1)).clamp_(min=0.0)
