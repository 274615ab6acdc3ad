"""A courier that comes late, as a GPU's does: what a step gives can be read only when somebody has waited for it."""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.transit import Arrival, pack, unpack


class LateArrival:
    """Bytes that are there once `released`, or when `delay_s` has passed."""

    def __init__(self, courier: "LateCourier", tensors: Sequence[Tensor], number: int) -> None:
        self._courier = courier
        self._number = number
        self._like = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._packed = pack(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
        self.released = threading.Event()

    def wait(self) -> Sequence[Tensor]:
        self._courier.log(f"wait {self._number}")
        if self._courier.lost is not None:
            raise self._courier.lost
        assert self.released.wait(self._courier.delay_of(self._number)) or not self._courier.holds, "nobody let it go"
        return unpack(self._packed, self._like)


class LateCourier:
    """Numbers what is sent, and notes in `events` when it is sent and waited for.

    Attributes:
        delay_of: seconds that what was sent takes, by its number.
        holds: whether it takes for ever, unless it is released.
        lost: raised by whoever waits.
    """

    is_late = True

    def __init__(self, delay_of: Callable[[int], float] = lambda number: 0.0, *, holds: bool = False) -> None:
        self.delay_of = delay_of
        self.holds = holds
        self.lost: Exception | None = None
        self.arrivals: list[LateArrival] = []
        self.events: list[str] = []

    def send(self, tensors: Sequence[Tensor]) -> Arrival:
        self.log(f"send {len(self.arrivals)}")
        self.arrivals.append(LateArrival(self, tensors, len(self.arrivals)))
        return self.arrivals[-1]

    def log(self, event: str) -> None:
        self.events.append(event)


def a_few_ms(number: int) -> float:
    """Sometimes longer than a step takes, sometimes not."""
    delay_s = (0.0, 0.004, 0.001, 0.0, 0.008)[number % 5]
    time.sleep(0)
    return delay_s
