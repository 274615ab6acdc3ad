"""How one step's tokens are shared out among the running sequences. Knows gaps, less what is in flight; no blocks."""

from collections.abc import Iterable

from scheduler.sequence import Sequence

Share = tuple[Sequence, int]
"""A sequence, and tokens of it: those it could compute, or those it may."""


class TokenBudget:
    """Tokens that one step may compute."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def take(self, wanted: int) -> int:
        """Give as many of the `wanted` tokens as are left."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted


def gaps_of(sequences: Iterable[Sequence]) -> list[Share]:
    """What the next step could compute of each, in order; without those that have nothing."""
    return [(s, num_ready) for s in sequences if (num_ready := s.num_ready)]


def allot(gaps: list[Share], budget: TokenBudget) -> list[Share]:
    """Share `budget` out over `gaps`, given and returned in policy order; without those that get nothing.

    Sequences about to give output are served first (one token each, so that nobody's stream stalls behind a long
    prompt); what is left closes the larger gaps, first in order first.
    """
    num_wanted = sum(gap for _, gap in gaps)
    if num_wanted <= budget.left:  # enough for all, whoever comes first
        budget.left -= num_wanted
        return gaps
    by_length = sorted(gaps, key=lambda pair: not pair[0].is_caught_up)
    granted = {s: budget.take(gap) for s, gap in by_length}
    return [(s, granted[s]) for s, _ in gaps if granted[s]]
