"""Every way of drawing there is on this machine, for tests that hold for all of them."""

from engine.native import find_native
from engine.sampling.native_race import NativeRace
from engine.sampling.race import Race, TorchRace

_kernels = find_native()

RACES: dict[str, Race] = {"torch": TorchRace()} | ({} if _kernels is None else {"native": NativeRace(_kernels)})
"""The second is missing where the native kernels cannot be built."""
