"""How a decoder's parameters are stored: the protocol, and plain tensors of one dtype on any device.

A store hands out the pieces that layers compute with and remembers, under canonical tensor names, the places that a
checkpoint has to fill. On the `meta` device nothing is allocated, which is how bytes are counted beforehand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.models.layers import DenseEmbedding, DenseLinear, Embedding, Linear
from engine.weights.assign import Place
from engine.weights.checkpoint import Checkpoint


class Parameters(Protocol):
    """Makes a model's parameters, uninitialised. Each method is called once per name.

    Attributes:
        dtype, device: what the model keeps keys and values in (and computes in, unless weights are packed), and where.
        places: canonical tensor name -> the place to fill, of everything made so far.
        nbytes: stored bytes of everything made so far.
    """

    dtype: torch.dtype
    device: torch.device
    places: dict[str, Place]
    nbytes: int

    def vector(self, name: str, size: int) -> Tensor:
        """`[size]`, always a plain tensor."""

    def linear(self, name: str, num_outputs: Mapping[str, int], num_inputs: int, bias: bool) -> Linear:
        """One product for the projections `name.part`, their outputs one below the other."""

    def embedding(self, name: str, num_rows: int, size: int) -> tuple[Embedding, Linear]:
        """A table of tensor `name`, and the product with the same table for a head that is tied to it."""

    def head(self, name: str, num_outputs: int, num_inputs: int) -> Linear:
        """An output head of its own, without bias."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor, or a view into a fused one."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.tensor.shape)

    def fill(self, checkpoint: Checkpoint, name: str) -> None:
        """Copy, cast to the tensor's dtype."""
        checkpoint.copy_into(name, self.tensor)


class DenseParameters:
    """Plain tensors of one dtype on one device; `Parameters`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.places: dict[str, Place] = {}
        self.nbytes = 0

    def vector(self, name: str, size: int) -> Tensor:
        """See `Parameters`."""
        return self._tensor(name, size)

    def linear(self, name: str, num_outputs: Mapping[str, int], num_inputs: int, bias: bool) -> DenseLinear:
        """See `Parameters`."""
        weight = self._stacked(name, "weight", num_outputs, (num_inputs,))
        return DenseLinear(weight, self._stacked(name, "bias", num_outputs, ()) if bias else None)

    def embedding(self, name: str, num_rows: int, size: int) -> tuple[DenseEmbedding, DenseLinear]:
        """See `Parameters`."""
        table = self._tensor(name, num_rows, size)
        return DenseEmbedding(table), DenseLinear(table)

    def head(self, name: str, num_outputs: int, num_inputs: int) -> DenseLinear:
        """See `Parameters`."""
        return DenseLinear(self._tensor(f"{name}.weight", num_outputs, num_inputs))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(shape)
        self.places[name] = TensorPlace(tensor)
        return tensor

    def _stacked(self, name: str, kind: str, num_rows: Mapping[str, int], rest: tuple[int, ...]) -> Tensor:
        whole = self._empty((sum(num_rows.values()), *rest))
        for part, view in zip(num_rows, torch.split(whole, list(num_rows.values())), strict=True):
            self.places[f"{name}.{part}.{kind}"] = TensorPlace(view)
        return whole

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.nbytes += tensor.nbytes
        return tensor
