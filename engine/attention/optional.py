"""What backends of optional libraries share: importing a library only when it is to serve, and refusing early.

Everything raised here is a `ValueError`, which `engine.attention.select` turns into an answer for the user: the library
is missing, the device is too old, or its kernels do not take this pool.
"""

import importlib
from collections.abc import Container
from dataclasses import dataclass
from types import ModuleType

import torch

from kvpool.storage import KVStorage


@dataclass(frozen=True, slots=True)
class Demands:
    """What a library's kernels ask of a pool.

    Attributes:
        name: of the backend, for messages.
        head_dims: head sizes that they take; in words for messages.
        block_multiple: the block size must be a multiple of it.
        capability: of the oldest GPU (major, minor) for float16; bfloat16 needs (8, 0) at least.
    """

    name: str
    head_dims: Container[int]
    head_dims_in_words: str
    block_multiple: int
    capability: tuple[int, int]

    def check(self, storage: KVStorage) -> None:
        """Raises ValueError, naming the one thing that stands in the way."""
        layout, dtype = storage.layout, storage.dtype
        found = capability_of(storage.device)
        if found is None:
            raise ValueError(f"{self.name} needs a CUDA device, and the KV cache is on {storage.device}")
        if layout.is_quantized or dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{self.name} reads float16 and bfloat16 KV caches, not one of {_name_of(dtype)}")
        if layout.head_dim not in self.head_dims:
            raise ValueError(f"{self.name} has kernels for {self.head_dims_in_words}, not {layout.head_dim}")
        if layout.block_size % self.block_multiple:
            raise ValueError(
                f"{self.name} needs a block size that is a multiple of {self.block_multiple}, got {layout.block_size}"
            )
        needed = max(self.capability, (8, 0)) if dtype == torch.bfloat16 else self.capability
        if found < needed:
            raise ValueError(
                f"{self.name} needs a GPU of compute capability {_dotted(needed)} for {_name_of(dtype)}, "
                f"this one has {_dotted(found)}"
            )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def load_library(module: str) -> ModuleType:
    """Import it now.

    Raises:
        ValueError: it is not installed, or refuses to be imported (built for another torch, say).
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"{module} cannot be imported ({error})") from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
