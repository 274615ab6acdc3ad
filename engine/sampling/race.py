"""The draw: every token runs a race against the others with noise of its own, and the first one home is drawn.

Token `i` takes the time `E_i / p_i`, with `E_i` exponentially distributed; the fastest is `i` with probability `p_i`
(Gumbel-max with `-log E` as the Gumbel noise; Maddison, Tarlow & Minka, "A* Sampling", 2014). So the token drawn is the
one with the highest `x_i - log E_i`, whatever the logits' common offset, and no sum over the vocabulary is needed.

The noise is a function of a key, two words per draw (see `engine.sampling.rng`), and the *token id*. Hence

    logits that differ in their last bits draw the same token, but for a near-tie of the two fastest;
    it does not matter which other tokens are looked at, so a few candidates draw what the whole vocabulary would.

Knows logits, token ids and keys; nothing of sampling settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.rng import Keys
from engine.sampling.state import accumulator
from engine.transit import upload

# The odd number spreads neighbouring ids (2**32 / golden ratio); the mixer is Wellons' "lowbias32", its two multipliers
# and shifts (Hash Function Prospector, 2018), with the key's words put in before each multiplication.
_SPREAD = 0x9E3779B9 - 2**32
_MIX_0 = 0x7FEB352D
_MIX_1 = 0x846CA68B - 2**32

_STEP = 2.0**-31 * (1.0 - 2.0**-24)
"""One part of 2**31, less a rounding error: so that even the largest numerator stays below 1 in float32."""

_CPU_CHUNK_ELEMENTS = 2**15 - 1
"""Few enough for a step's temporaries to stay in a core's own cache. And below torch's grain of parallel work: several
rows of a chunk are added up on one thread each, a longer row is alone in its chunk, so no sum depends on neighbours."""

_CHUNK_ELEMENTS = 2**24
"""On other devices: 64 MB for each temporary."""


@dataclass(frozen=True, slots=True)
class Border:
    """A place in each row's order from most to least likely, lower ids first among equals.

    Ahead of it are the columns with a logit above `logits` [n], and those with just that logit and a column below
    `ids` [n] int64. Both contiguous.
    """

    logits: Tensor
    ids: Tensor

    @classmethod
    def at(cls, x: Tensor, columns: Tensor) -> "Border":
        """The border just before `columns` [n] of logits `x` [n, width]."""
        return cls(x.gather(-1, columns.unsqueeze(-1)).squeeze(-1), columns)

    def take(self, index: Tensor | slice) -> "Border":
        """Some of the rows."""
        return Border(self.logits[index], self.ids[index])

    def ahead(self, x: Tensor) -> Tensor:
        """Ones where logits `x` [n, width] lie ahead of the border, zeros elsewhere: [n, width] of the type of `x`.

        Numbers, not booleans: on a CPU comparing in place and adding up are several times faster so.
        """
        logits, ids = self.logits.unsqueeze(-1), self.ids.unsqueeze(-1)
        columns = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device).repeat(len(x), 1)
        tied = x.clone().eq_(logits).mul_(columns.lt_(ids))
        return x.clone().gt_(logits).add_(tied)


class Race(Protocol):
    """Two questions about rows of logits `x` [n, width] float32, contiguous; a row's answers depend on it alone."""

    def winners(
        self, x: Tensor, keys: Keys, *, ids: Tensor | None = None, border: Border | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw. `keys` [n, 2] int32; `ids` [n, width] int64 are the columns' token ids, ascending (None: the columns
        themselves). With `border` only what lies ahead of it runs.

        Returns:
            token ids [n] int64, and the highest logit of each row [n]. Where that is not finite the id means nothing
            (but is one of the row). A token of probability zero (-inf) is never drawn. Ties go to the lower id.
        """

    def ahead(self, x: Tensor, border: Border) -> tuple[Tensor, Tensor]:
        """How many columns lie ahead of the border, [n] int64, and which share of the probability, [n]."""


class TorchRace:
    """The race with torch's operators: for every device, and the twin of the native one. Float64 logits are taken."""

    def winners(
        self, x: Tensor, keys: Keys, *, ids: Tensor | None = None, border: Border | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Race`."""
        peaks = x.amax(-1)
        columns = torch.empty(len(x), dtype=torch.int64, device=x.device)
        words = upload(torch.from_numpy(keys), x.device)
        runners = torch.arange(x.shape[-1], device=x.device) if ids is None else ids
        runners = runners.int().expand(x.shape)
        for rows in row_chunks(x):
            # Less the peak, so that no logits are so large that the noise is lost in their rounding.
            scores = (x[rows] - peaks[rows].unsqueeze(-1)).sub_(log_exponentials(runners[rows], words[rows]))
            if border is not None:
                scores.sub_(border.take(rows).ahead(x[rows]).reciprocal_().sub_(1.0))  # minus infinity for a zero
            columns[rows] = scores.argmax(-1)
        return columns if ids is None else ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1), peaks

    def ahead(self, x: Tensor, border: Border) -> tuple[Tensor, Tensor]:
        """See `Race`."""
        counts = torch.empty(len(x), dtype=torch.int64, device=x.device)
        shares = torch.empty(len(x), dtype=accumulator(x.device), device=x.device)
        for rows in row_chunks(x):
            weights = (x[rows] - x[rows].amax(-1, keepdim=True)).exp_()
            ahead, total = border.take(rows).ahead(x[rows]), weights.sum(-1)
            counts[rows] = ahead.sum(-1).long()
            shares[rows] = weights.mul_(ahead).sum(-1).to(shares.dtype) / total
        return counts, shares


def row_chunks(x: Tensor) -> Iterator[slice]:
    """The rows of `x` [n, width], some at a time."""
    elements = _CPU_CHUNK_ELEMENTS if x.device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(1, elements // max(1, x.shape[-1]))
    return (slice(first, first + step) for first in range(0, len(x), step))


def log_exponentials(ids: Tensor, keys: Tensor) -> Tensor:
    """log E [n, width] float32, finite, for token ids [n, width] int32 and keys [n, 2] int32.

    E = -log(1 - v) with v = (h + 1/2) / 2**31 and h a hash of 31 bits. The fast runners are those with a small v, and
    there neither v nor E loses precision, in float32 either: v reaches down to 2**-32.
    """
    return _hashed(ids, keys).float().add_(0.5).mul_(-_STEP).log1p_().neg_().log_()


def _hashed(ids: Tensor, keys: Tensor) -> Tensor:
    """31 random bits [n, width] int32. Integer operations only, wrapping, so the same on every device.

    torch has no logical shift of signed numbers, hence the masks. The last shift is arithmetic on purpose: it clears
    the top bit, and the other 31 are as even as before.
    """
    h = (ids * _SPREAD).bitwise_xor_(keys[:, :1])
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= _MIX_0
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h ^= keys[:, 1:]
    h *= _MIX_1
    h ^= h >> 16
    return h
