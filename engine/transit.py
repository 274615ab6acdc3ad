"""Copies between host and device that nobody waits for: up before a step's work, down after it.

    up      in the device's order of work, from pinned memory that is not used again before the copy has been made
    down    all that a step gives in one copy, to pinned memory; only who needs it waits, `Arrival.wait`

So a step can be given to the device while the one before it runs. Knows tensors and their device; nothing of steps.
On a CPU nothing travels: work is done when it has been given, and a tensor is where it is needed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """`host` as a tensor on the device: on a CPU itself, so nobody may change it afterwards.

    On CUDA the pinned copy belongs to torch's pool of host memory, which gives it out again only when the device has
    read it. Without one the device's whole queue of work would be waited for.
    """
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Arrival(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors, once they are there; in any thread, any number of times.

        Raises:
            torch.AcceleratorError: the device is lost.
        """


class Courier(Protocol):
    """Brings what a step gives to the host. `is_late` says whether it comes later than it is sent."""

    is_late: bool

    def send(self, tensors: Sequence[Tensor]) -> Arrival:
        """Have the device send these, when it has come so far; wider element types first."""


class _Here:
    """What is on the host already."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class HostCourier:
    """A CPU's: everything is there when it is sent."""

    is_late = False

    def send(self, tensors: Sequence[Tensor]) -> Arrival:
        """See `Courier`."""
        return _Here(tensors)


class CudaCourier:
    """One copy, and an event behind it, on the current stream."""

    is_late = True

    def send(self, tensors: Sequence[Tensor]) -> Arrival:
        """See `Courier`."""
        packed = pack(tensors)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        event.record()
        return _CudaArrival(event, host, tensors)


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event, host: Tensor, sent: Sequence[Tensor]) -> None:
        self._event = event
        self._host = host
        self._like = [(tensor.dtype, tensor.shape) for tensor in sent]

    def wait(self) -> Sequence[Tensor]:
        self._event.synchronize()
        return unpack(self._host, self._like)


def courier_for(device: torch.device) -> Courier:
    """The device's courier."""
    return CudaCourier() if device.type == "cuda" else HostCourier()


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all, one after the other: `[num_bytes]` uint8 on their device."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: Tensor, like: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    """What `pack` was given, from its bytes; each begins at a multiple of its element's size."""
    tensors, first = [], 0
    for dtype, shape in like:
        end = first + shape.numel() * dtype.itemsize
        assert first % dtype.itemsize == 0, "wider element types come first"
        tensors.append(packed[first:end].view(dtype).reshape(shape))
        first = end
    return tensors
