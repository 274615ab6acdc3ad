"""Constrained decoding, as the engine sees it: a per-slot state that fills token masks. Torch-free protocols.

The grammar itself is compiled outside (by the server); the engine only starts states, asks for masks and reports the
tokens that were accepted.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bitmask = npt.NDArray[np.int32]
"""`[ceil(vocab_size / 32)]`, bit `i % 32` of word `i // 32` set where token `i` is allowed."""


class ConstraintState(Protocol):
    """The state of one sequence in its grammar. Used by one thread at a time."""

    def fill_mask(self, out: Bitmask) -> None:
        """Write which tokens may come next (stop tokens included where the grammar may end).

        `out` comes zeroed and as wide as the model's vocabulary; words the grammar does not know stay zero.

        Raises:
            ValueError, RuntimeError: the state is broken; the sequence ends with an error.
        """

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over accepted tokens; False when the grammar does not allow one of them.

        Raises:
            ValueError, RuntimeError: the state is broken; the sequence ends with an error.
        """

    @property
    def is_stopped(self) -> bool:
        """Whether the grammar is complete and nothing more may follow."""

    @property
    def error(self) -> str | None:
        """Why no token is allowed any more, when the state is broken rather than complete."""


class Constraint(Protocol):
    """A compiled grammar, shared and immutable; each sequence starts its own state."""

    def start(self) -> ConstraintState:
        """A fresh state at the grammar's beginning.

        Raises:
            ValueError, RuntimeError: the grammar cannot start; the sequence ends with an error.
        """
