"""Carries out the sampler order: from a step's logits to one token per row.

The steps and their default order, numbered in `engine.sampling.params.SAMPLER_ORDER`:

    1. mask         allowed / banned tokens, bad words, minimum length, grammar      masks.py
    2. logit_bias   added to the raw logits                                          penalties.py
    3. penalties    repetition, frequency, presence, on the raw logits               penalties.py
    4. temperature  division; a greedy row takes the highest logit here instead      here
    5. typical_p                                                                     truncation.py
    6. top_k  7. top_p  8. min_p, then the draw                                      draw.py, race.py

A row with an order of its own goes through the same steps in that order. Greedy rows go through the edits (1-3) only,
in their order. Rows with the same steps are computed together; nothing about a row depends on the others.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from engine.sampling import truncation
from engine.sampling.draw import Cut, truncate_and_draw
from engine.sampling.masks import TokenMasks
from engine.sampling.penalties import LogitBias, Penalties
from engine.sampling.race import Race
from engine.sampling.state import EDITS, Ints, SlotTable, Steps, floats_on, ints_on, on_rows

MIN_TEMPERATURE = 1e-20
"""Lower temperatures count as this one: it already leaves nothing but the highest logit, and logits up to 1e18 divided
by it stay finite."""

_TAIL: Steps = ("top_k", "top_p", "min_p")


class Outcome(IntEnum):
    """What became of a row."""

    OK = 0
    BROKEN = 1  # the model's logits are NaN, infinite or all -inf
    EMPTY = 2  # no token is left to choose from


def chosen_of(tokens: Tensor, peaks: Tensor, raw_peaks: Tensor) -> Tensor:
    """What `Pipeline.choose` returns, from each row's token and its highest logit after and before all steps: [n] each.

    On a CPU numpy puts it together: its calls cost less than torch's.
    """
    if tokens.device.type != "cpu":
        outcome = torch.where(peaks.isfinite(), Outcome.OK, Outcome.EMPTY)
        return torch.stack((tokens, torch.where(raw_peaks.isfinite(), outcome, Outcome.BROKEN)))
    chosen = np.empty((2, len(tokens)), dtype=np.int64)
    chosen[0] = tokens.numpy()
    chosen[1] = np.where(np.isfinite(peaks.numpy()), int(Outcome.OK), int(Outcome.EMPTY))
    chosen[1, ~np.isfinite(raw_peaks.numpy())] = int(Outcome.BROKEN)
    return torch.from_numpy(chosen)


def first_highest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row of `x` [n, vocab], and the first column that holds it: [n] each. NaN is highest.

    On a CPU numpy looks for it: torch, when asked for the column as well, takes fifteen times as long.
    """
    if x.device.type != "cpu":
        peaks, columns = x.max(-1)
        return peaks, columns
    rows = x.numpy()
    found = rows.argmax(-1)
    return torch.from_numpy(rows[np.arange(len(rows)), found]), torch.from_numpy(found)


def highest(logits: Tensor) -> Tensor:
    """What `Pipeline.choose` comes to for greedy rows whose logits no step edits, with the fewest operators."""
    return highest_on_host(logits) if logits.device.type == "cpu" else highest_on_device(logits)


def highest_on_device(logits: Tensor) -> Tensor:
    """`highest` with torch. The difference of a number with itself is 0 exactly where it is finite."""
    peaks, tokens = logits.max(-1)
    return torch.stack((tokens, (peaks - peaks) != 0.0))  # true is `Outcome.BROKEN`


def highest_on_host(logits: Tensor) -> Tensor:
    """`highest` with numpy, whose calls cost less than torch's."""
    rows = logits.numpy()
    chosen = np.empty((2, len(rows)), dtype=np.int64)
    tokens, outcomes = chosen
    rows.argmax(-1, out=tokens)
    np.logical_not(np.isfinite(rows[np.arange(len(rows)), tokens]), out=outcomes, casting="unsafe")
    return torch.from_numpy(chosen)


class Pipeline:
    """The steps, bound to the state they read, and the race that draws."""

    def __init__(self, table: SlotTable, masks: TokenMasks, bias: LogitBias, penalties: Penalties, race: Race) -> None:
        self._table = table
        self._race = race
        self._steps: dict[str, Callable[[Tensor, Ints], Tensor]] = {
            "mask": masks.apply,
            "logit_bias": bias.apply,
            "penalties": penalties.apply,
            "temperature": self._temperature,
            "typical_p": self._typical_p,
            "top_k": self._top_k,
            "top_p": self._top_p,
            "min_p": self._min_p,
        }

    def choose(self, logits: Tensor, slots: Ints, *, are_edited: bool = True) -> Tensor:
        """One token per row of `logits` [n, vocab] float32 (overwritten), row `i` being of slot `slots[i]`.

        `are_edited` False says that steps 1 to 3 have nothing to do for any of them.

        Returns:
            [2, n] int64: token ids, and each row's `Outcome` (the token means nothing unless it is OK).
        """
        programs = self._table.program[slots]
        if (programs == programs[0]).all():
            return self._run(self._steps_of(programs[0], are_edited), logits, slots)
        chosen = torch.empty((2, len(slots)), dtype=torch.int64, device=logits.device)
        for program in np.unique(programs):
            rows = np.flatnonzero(programs == program)
            index = ints_on(logits.device, rows)
            chosen[:, index] = self._run(self._steps_of(program, are_edited), logits[index], slots[rows])
        return chosen

    def _steps_of(self, program: int, are_edited: bool) -> Steps:
        steps = self._table.programs[program]
        return steps if are_edited else tuple(step for step in steps if step not in EDITS)

    def _run(self, steps: Steps, x: Tensor, slots: Ints) -> Tensor:
        """`choose` for rows that all go through `steps`."""
        raw_peaks = x.amax(-1)
        if "temperature" not in steps:
            tokens, peaks = self._greedy(steps, x, slots)
        elif steps[-len(_TAIL) :] == _TAIL:
            x = self._apply(steps[: -len(_TAIL)], x, slots)
            tokens, peaks = truncate_and_draw(x, self._cut(slots), self._race)
        else:
            x = self._apply(steps, x, slots)
            tokens, peaks = self._race.winners(x, self._table.keys(slots))
        return chosen_of(tokens, peaks, raw_peaks)

    def _apply(self, steps: Steps, x: Tensor, slots: Ints) -> Tensor:
        for step in steps:
            x = self._steps[step](x, slots)
        return x

    def _greedy(self, steps: Steps, x: Tensor, slots: Ints) -> tuple[Tensor, Tensor]:
        peaks, tokens = first_highest(self._apply(steps, x, slots))
        return tokens, peaks

    def _cut(self, slots: Ints) -> Cut:
        table = self._table
        return Cut(table.top_k[slots], table.top_p[slots], table.min_p[slots], table.keys(slots))

    def _temperature(self, x: Tensor, slots: Ints) -> Tensor:
        temperature = self._table.temperature[slots]
        if (temperature == 1.0).all():
            return x
        divisor = floats_on(x.device, np.maximum(temperature, MIN_TEMPERATURE)).to(x.dtype)
        return x.div_(divisor.unsqueeze(-1))

    def _typical_p(self, x: Tensor, slots: Ints) -> Tensor:
        def keep(x: Tensor, slots: Ints) -> Tensor:
            return truncation.typical_p(x, floats_on(x.device, self._table.typical_p[slots]))

        return on_rows(x, slots, self._table.typical_p[slots] < 1.0, keep)

    def _top_k(self, x: Tensor, slots: Ints) -> Tensor:
        def keep(x: Tensor, slots: Ints) -> Tensor:
            k = self._table.top_k[slots]
            return truncation.top_k(x, ints_on(x.device, k), int(k.max()))

        return on_rows(x, slots, self._table.top_k[slots] > 0, keep)

    def _top_p(self, x: Tensor, slots: Ints) -> Tensor:
        def keep(x: Tensor, slots: Ints) -> Tensor:
            return truncation.top_p(x, floats_on(x.device, self._table.top_p[slots]))

        return on_rows(x, slots, self._table.top_p[slots] < 1.0, keep)

    def _min_p(self, x: Tensor, slots: Ints) -> Tensor:
        def keep(x: Tensor, slots: Ints) -> Tensor:
            return truncation.min_p(x, floats_on(x.device, self._table.min_p[slots]))

        return on_rows(x, slots, self._table.min_p[slots] > 0.0, keep)
