"""The steps that narrow the distribution: typical-p, top-k, top-p, min-p; and the fast way to few candidates.

Each takes logits `x` [n, width] and one setting per row [n], and gives logits with -inf where a token was dropped.
Columns must be in ascending order of token id: ties then go to the lower id everywhere, whatever the width. Knows
tensors only.

Ties are rare. On a CPU it is asked whether there are any, and the work for them is left out; elsewhere asking would
mean waiting for the device, so that work is done always, or is part of the comparison (`_ranks`).
"""

import torch
from torch import Tensor

from engine.sampling.race import row_chunks
from engine.sampling.state import accumulator

_DROPPED = float("-inf")
_LEAST = -1e4
"""Stands for the log of 0 where that is multiplied by 0."""
_GROUP = 64
"""Columns whose highest stands for them while candidates are looked for."""


def top_k(x: Tensor, k: Tensor, largest: int | None = None) -> Tensor:
    """Keep exactly the `k` [n] (1..width) highest of each row; of equal ones at the border those with the lower ids.

    `largest` is the highest of `k`, or more; None asks the device.
    """
    highest = torch.topk(x, int(k.max()) if largest is None else largest, dim=-1).values
    border = highest.gather(-1, k.unsqueeze(-1) - 1)
    keep = x >= border
    crowded = (keep.sum(-1) > k) & (border.squeeze(-1) > _DROPPED)
    if x.device.type != "cpu" or crowded.any():
        above = x > border
        tied = keep & ~above
        room = k.unsqueeze(-1) - above.sum(-1, keepdim=True)
        keep = above | (tied & (tied.cumsum(-1) <= room))
    return x.masked_fill(~keep, _DROPPED)


def top_p(x: Tensor, p: Tensor) -> Tensor:
    """Nucleus (Holtzman et al. 2019): the most likely tokens, up to and including the one that reaches `p` (0..1]."""
    ordered, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    reached = weights.cumsum(-1, dtype=accumulator(x.device))
    keep = reached - weights < (p * reached[:, -1]).unsqueeze(-1)
    return x.masked_fill(~torch.zeros_like(keep).scatter(-1, columns, keep), _DROPPED)


def min_p(x: Tensor, p: Tensor) -> Tensor:
    """Keep tokens at least `p` (0..1) times as likely as the most likely one (Nguyen et al. 2024)."""
    return x.masked_fill(x < min_p_floor(x, p).unsqueeze(-1), _DROPPED)


def min_p_floor(x: Tensor, p: Tensor) -> Tensor:
    """The lowest logit [n] that min-p keeps."""
    return (x.amax(-1) + p.log()).to(x.dtype)


def typical_p(x: Tensor, p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprisal is nearest to the entropy, up to mass `p`.

    The one that reaches `p` is kept, and so are all at the same distance, as transformers does.
    """
    kept = torch.empty_like(x)
    for rows in row_chunks(x):
        logprobs = torch.log_softmax(x[rows], dim=-1)
        probs = logprobs.exp()
        entropy = -logprobs.clamp(min=_LEAST).mul_(probs).sum(-1, keepdim=True)
        distances = logprobs.add_(entropy).abs_()
        furthest = _reaching(distances, probs, p[rows].unsqueeze(-1))
        kept[rows] = x[rows].masked_fill(distances > furthest, _DROPPED)
    return kept


def _reaching(distances: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """The smallest distance [n, 1] within which `weights` [n, width] add up to `p` [n, 1]; `distances` [n, width].

    In other words the largest below which they do not. Its bit pattern is found from the top bit down: float32 from 0
    up are in the order of their patterns. 31 sums, exact, and a fraction of what sorting costs. (Where all of a row
    falls short of `p` by a rounding error the answer is no number, and nothing is further than that.)
    """
    found = torch.zeros_like(p, dtype=torch.int32)
    for bit in range(30, -1, -1):
        longer = found | 1 << bit
        below = distances.clone().lt_(longer.view(torch.float32)).mul_(weights).sum(-1, keepdim=True)
        found = torch.where(below < p, longer, found)
    return found.view(torch.float32)


def narrow(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest of each row: their logits and columns, both [n, width], in ascending order of column.

    The same candidates as `top_k`, whatever the device's own order of equal values.
    """
    columns = (_highest if x.device.type == "cpu" else highest_ranked)(x, width).sort(-1).values
    return x.gather(-1, columns), columns


def highest_ranked(x: Tensor, width: int) -> Tensor:
    """Columns [n, width] of the `width` highest of each row of `x` (float32), of equal ones those with lower columns.

    Looked for among the columns of the `width` groups whose own highest rank highest. What is elsewhere ranks below
    one of each of these groups: groups are in order of column, so that holds for equal values as well.
    """
    if not _is_worth_grouping(x, width):
        every = torch.arange(x.shape[-1], device=x.device)
        return torch.topk(_ranks(x, every), width, dim=-1).indices
    peaks = _group_peaks(x)
    groups = torch.topk(_ranks(peaks, torch.arange(peaks.shape[-1], device=x.device)), width, dim=-1).indices
    pool = _columns_of(x, groups)
    places = torch.topk(_ranks(x.gather(-1, pool), pool), width, dim=-1).indices
    return pool.gather(-1, places)


def _ranks(x: Tensor, columns: Tensor) -> Tensor:
    """A number for each logit [n, width], all different in a row: in order of value, then from the last column down.

    The bits of a float32 from 0 up are in its order, those of a negative one in the reverse: 31 of them are flipped.
    """
    bits = (x + 0.0).view(torch.int32)  # the sum makes one zero of the two
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - columns


def _highest(x: Tensor, width: int) -> Tensor:
    """The same, for a CPU: values are compared, and the rows where others tie with the last of them are done anew."""
    columns, crowded = _highest_or_equal(x, width)
    if crowded.any():
        rows = crowded.nonzero().squeeze(-1)
        exact = top_k(x[rows], torch.full_like(rows, width))
        columns[rows] = torch.topk(exact, width, dim=-1).indices
    return columns


def _highest_or_equal(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns [n, width] of `width` highest logits, and the rows [n] where others tie with the last of them."""
    if not _is_worth_grouping(x, width):
        values, columns = torch.topk(x, width, dim=-1)
        return columns, _crowded(x, values)
    peaks = _group_peaks(x)
    pool = _columns_of(x, torch.topk(peaks, width, dim=-1).indices)
    among = x.gather(-1, pool)
    values, places = torch.topk(among, width, dim=-1)
    # A tie outside the pool is in a group whose highest ties, and then more than `width` groups reach that far.
    return pool.gather(-1, places), _crowded(among, values) | _crowded(peaks, values)


def _is_worth_grouping(x: Tensor, width: int) -> bool:
    return 4 * width <= x.shape[-1] // _GROUP


def _group_peaks(x: Tensor) -> Tensor:
    """The highest of each whole group of columns, `[n, groups]`."""
    num_groups = x.shape[-1] // _GROUP
    return x[:, : num_groups * _GROUP].view(len(x), num_groups, _GROUP).amax(-1)


def _columns_of(x: Tensor, groups: Tensor) -> Tensor:
    """The columns of `groups` [n, width], and those of the incomplete last group: `[n, columns]`."""
    pool = (groups.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=x.device)).flatten(1)
    rest = torch.arange(x.shape[-1] // _GROUP * _GROUP, x.shape[-1], device=x.device).expand(len(x), -1)
    return torch.cat((pool, rest), dim=-1)


def _crowded(x: Tensor, values: Tensor) -> Tensor:
    """Whether more of each row of `x` reach the lowest of `values` [n, width] than there are of these; bool [n]."""
    border = values[:, -1:]
    return ((x >= border).sum(-1) > values.shape[-1]) & (border.squeeze(-1) > _DROPPED)
