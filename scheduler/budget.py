"""How one step's tokens are shared out among the running sequences. Knows gaps; knows no blocks."""

from collections.abc import Iterable

from scheduler.sequence import Sequence


class TokenBudget:
    """Tokens that one step may compute."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def take(self, wanted: int) -> int:
        """Give as many of the `wanted` tokens as are left."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted


def allot(sequences: Iterable[Sequence], budget: TokenBudget) -> list[tuple[Sequence, int]]:
    """Share `budget` out over `sequences`, given and returned in policy order; without those that get nothing.

    Sequences about to give output are served first (one token each, so that nobody's stream stalls behind a long
    prompt); what is left closes the larger gaps, first in order first.
    """
    ordered = list(sequences)
    granted = {s: budget.take(s.gap) for s in sorted(ordered, key=_has_long_gap)}
    return [(s, granted[s]) for s in ordered if granted[s]]


def _has_long_gap(sequence: Sequence) -> bool:
    return not sequence.is_caught_up
