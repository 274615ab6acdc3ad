"""Fills a model's parameters from a checkpoint, strictly: every tensor has one place and every place one tensor.

Knows names and shapes; knows nothing of file formats, of how a place stores what it gets, or of what parameters do.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.errors import LoadError
from engine.weights.checkpoint import Checkpoint

_HEAD = "lm_head.weight"
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias)")
"""Buffers that older exports stored although they follow from the configuration."""


class Place(Protocol):
    """Where one tensor of a checkpoint goes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""

    def fill(self, checkpoint: Checkpoint, name: str) -> None:
        """Take the tensor's values.

        Raises:
            LoadError: the tensor's data is damaged or of a type that cannot be decoded.
        """


def assign(
    checkpoint: Checkpoint, targets: Mapping[str, Place], tied_head: bool, loaded: Callable[[float], None]
) -> None:
    """Put every tensor of `checkpoint` into the place of its name, one at a time.

    Args:
        targets: name -> the place to fill; several may be parts of one fused matrix.
        tied_head: the head is the embedding, so a stored copy of it is not read.
        loaded: told the share of all elements that is in place, 0..1.

    Raises:
        LoadError: a tensor is missing, extra or misshapen; nothing has been filled then.
    """
    names = set(checkpoint.names())
    _check_names(names, set(targets), tied_head)
    _check_shapes(checkpoint, targets)
    total = sum(math.prod(target.shape) for target in targets.values())
    done = 0
    for name, target in targets.items():
        target.fill(checkpoint, name)
        done += math.prod(target.shape)
        loaded(done / total)


def _check_names(names: set[str], wanted: set[str], tied_head: bool) -> None:
    extra = {name for name in names - wanted if not _HARMLESS.fullmatch(name) and not (tied_head and name == _HEAD)}
    problems = [("missing", sorted(wanted - names)), ("not part of this model", sorted(extra))]
    told = [f"{_some(found)} {'is' if len(found) == 1 else 'are'} {what}" for what, found in problems if found]
    if told:
        raise LoadError("checkpoint and model differ: " + "; ".join(told))


def _check_shapes(checkpoint: Checkpoint, targets: Mapping[str, Place]) -> None:
    for name, target in targets.items():
        stored, wanted = checkpoint.shape(name), target.shape
        if stored != wanted:
            raise LoadError(f"tensor {name} is {list(stored)} in the checkpoint, the model needs {list(wanted)}")


def _some(names: list[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - most
    listed = ", ".join(names[:most])
    return f"tensor{'s' if len(names) > 1 else ''} {listed}" + (f" and {more} more" if more > 0 else "")
