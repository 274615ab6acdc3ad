"""Which loads are run, and how often: presets, and cells made of a mix of questions and a way they arrive."""

from dataclasses import dataclass

from bench.arrivals import Arrival, Closed, Poisson
from bench.workloads import Mix, mix_named

OPEN_LOOP_S = 20.0
"""How long requests keep arriving in an open-loop cell."""
OPEN_LOOP_REQUESTS = (10, 400)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: `num_requests` questions of a mix, arriving so; `repeats` times on each server in turn."""

    mix: Mix
    arrival: Arrival
    num_requests: int
    repeats: int

    def __str__(self) -> str:
        return f"{self.mix.name}, {self.arrival}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of one model.

    Attributes:
        users: closed-loop users, each with every one of `mixes`.
        extras: (mix, users) besides.
        shares: open-loop rates of the first mix, as shares of what the first server reached with the most users.
        rates: open-loop rates in requests per second.
        rounds: requests per user; None decides by the number of users.
    """

    users: tuple[int, ...]
    mixes: tuple[str, ...] = ("128/64",)
    extras: tuple[tuple[str, int], ...] = ()
    shares: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    repeats: int = 3
    extra_repeats: int = 1
    rounds: int | None = None

    def closed_cells(self) -> list[Cell]:
        """Closed-loop cells, fewest users first."""
        cells = [self._closed(mix, users, self.repeats) for mix in self.mixes for users in self.users]
        return cells + [self._closed(mix, users, self.extra_repeats) for mix, users in self.extras]

    def open_cells(self, capacity_per_s: float) -> list[Cell]:
        """Open-loop cells, given how many requests per second the first server could do."""
        rates = [*self.rates, *(share * capacity_per_s for share in self.shares)]
        low, high = OPEN_LOOP_REQUESTS
        mix = mix_named(self.mixes[0])
        return [
            Cell(mix, Poisson(rate), max(low, min(high, round(rate * OPEN_LOOP_S))), self.extra_repeats)
            for rate in sorted(rates)
        ]

    def _closed(self, mix: str, users: int, repeats: int) -> Cell:
        rounds = self.rounds or (4 if users < 4 else 2 if users < 16 else 1)
        return Cell(mix_named(mix), Closed(users), users * rounds, repeats)


PRESETS = {
    "brief": Plan(users=(1, 8, 32), repeats=1),
    "short": Plan(
        users=(1, 8, 32), extras=(("sharegpt", 8), ("2000/64", 1), ("prefix", 8)), shares=(0.5, 0.8), repeats=3
    ),
    "full": Plan(
        users=(1, 2, 4, 8, 16, 32, 64),
        extras=(("sharegpt", 32), ("2000/64", 1), ("2000/64", 8), ("prefix", 32)),
        shares=(0.3, 0.5, 0.7, 0.9, 1.1),
        repeats=3,
        extra_repeats=3,
    ),
}


def distinct_seed(cell: Cell, repeat: int) -> str:
    """The same for every server, another for every repeat, so that no cache knows the questions."""
    return f"{cell}/{repeat}"
