"""The steps that narrow the distribution: typical-p, top-k, top-p, min-p; and the fast way to few candidates.

Each takes logits `x` [n, width] and one setting per row [n], and gives logits with -inf where a token was dropped.
Columns must be in ascending order of token id: ties then go to the lower id everywhere, whatever the width. Knows
tensors only.
"""

import torch
from torch import Tensor

from engine.sampling.state import accumulator

_DROPPED = float("-inf")


def top_k(x: Tensor, k: Tensor) -> Tensor:
    """Keep exactly the `k` [n] (1..width) highest of each row; of equal ones at the border those with the lower ids."""
    highest = torch.topk(x, int(k.max()), dim=-1).values
    border = highest.gather(-1, k.unsqueeze(-1) - 1)
    keep = x >= border
    crowded = (keep.sum(-1) > k) & (border.squeeze(-1) > _DROPPED)
    if crowded.any():
        above = x > border
        tied = keep & ~above
        room = k.unsqueeze(-1) - above.sum(-1, keepdim=True)
        keep = above | (tied & (tied.cumsum(-1) <= room))
    return x.masked_fill(~keep, _DROPPED)


def top_p(x: Tensor, p: Tensor, total: Tensor | None = None) -> Tensor:
    """Nucleus (Holtzman et al. 2019): the most likely tokens, up to and including the one that reaches `p` (0..1].

    `total` [n] is the probability mass in units of the most likely token's, when `x` does not hold all of it.
    """
    ordered, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    reached = weights.cumsum(-1, dtype=accumulator(x.device))
    if total is None:
        total = reached[:, -1]
    keep = reached - weights < (p * total).unsqueeze(-1)
    return x.masked_fill(~torch.zeros_like(keep).scatter(-1, columns, keep), _DROPPED)


def min_p(x: Tensor, p: Tensor) -> Tensor:
    """Keep tokens at least `p` (0..1) times as likely as the most likely one (Nguyen et al. 2024)."""
    floor = (x.amax(-1) + p.log()).to(x.dtype)
    return x.masked_fill(x < floor.unsqueeze(-1), _DROPPED)


def typical_p(x: Tensor, p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprisal is nearest to the entropy, up to mass `p`.

    The one that reaches `p` is kept, and so are all at the same distance, as transformers does.
    """
    logprobs = torch.log_softmax(x, dim=-1)
    probs = logprobs.exp()
    entropy = torch.special.entr(probs).sum(-1, keepdim=True)
    distance = (logprobs + entropy).abs()
    ordered, columns = torch.sort(distance, dim=-1, stable=True)
    reached = probs.gather(-1, columns).cumsum(-1, dtype=accumulator(x.device))
    last = (reached < p.unsqueeze(-1)).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return x.masked_fill(distance > ordered.gather(-1, last), _DROPPED)


def narrow(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest of each row: their logits and columns, both [n, width], in ascending order of column.

    The same candidates as `top_k`, whatever the device's own order of equal values.
    """
    values, columns = torch.topk(x, width, dim=-1)
    border = values[:, -1:]
    crowded = ((x >= border).sum(-1) > width) & (border.squeeze(-1) > _DROPPED)
    if crowded.any():
        rows = crowded.nonzero().squeeze(-1)
        exact = top_k(x[rows], torch.full_like(rows, width))
        values[rows], columns[rows] = torch.topk(exact, width, dim=-1)
    columns, order = columns.sort(-1)
    return values.gather(-1, order), columns
