"""Which attention backend serves: by name, or the best that this device has; the reason is kept, and logged."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.attention.flash_attn_paged import FlashAttnAttention
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionShape
from engine.attention.native_cpu import NativeCPUAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.errors import LoadError
from engine.native import NativeUnavailable, find_native
from kvpool.storage import KVStorage

_log = logging.getLogger(__name__)

BACKENDS: Mapping[str, Callable[[KVStorage, AttentionShape], AttentionBackend]] = MappingProxyType(
    {backend.name: backend for backend in (NativeCPUAttention, TorchPagedAttention, ReferenceAttention)}
)
"""The backends that run wherever torch does, or on any CPU; the preferred first."""


def _triton(storage: KVStorage, shape: AttentionShape) -> AttentionBackend:
    """Imported only where it is to serve: an installation for CPUs has no triton and must not need it."""
    try:
        from engine.attention.triton_paged import TritonAttention
    except ImportError as error:
        raise ValueError(f"triton cannot be imported ({error})") from error
    return TritonAttention(storage, shape)


GPU_BACKENDS: Mapping[str, Callable[[KVStorage, AttentionShape], AttentionBackend]] = MappingProxyType(
    {"triton": _triton, "flashinfer": FlashInferAttention, "flash-attn": FlashAttnAttention}
)
"""Those that need a GPU, the preferred first: what they import, they import when they are made."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend, and why it was chosen."""

    backend: AttentionBackend
    reason: str


def select_attention(name: str, storage: KVStorage, shape: AttentionShape) -> Selection:
    """Make the backend called `name`, or with `auto` the preferred one for the pool's device and dtype.

    Raises:
        LoadError: there is no backend of that name, or it cannot serve here.
    """
    selection = _best(storage, shape) if name == "auto" else _named(name, storage, shape)
    _log.info("attention by %s: %s", selection.backend.name, selection.reason)
    return selection


def _named(name: str, storage: KVStorage, shape: AttentionShape) -> Selection:
    backends = {**BACKENDS, **GPU_BACKENDS}
    if name not in backends:
        raise LoadError(f"no attention backend {name!r}; there are: auto, {', '.join(backends)}")
    try:
        return Selection(backends[name](storage, shape), "chosen by name")
    except (NativeUnavailable, ValueError) as error:
        raise LoadError(f"attention backend {name!r} cannot serve here: {error}") from error


def _best(storage: KVStorage, shape: AttentionShape) -> Selection:
    if storage.device.type == "cpu" and find_native() is not None:
        return Selection(NativeCPUAttention(storage, shape), "native kernels for this CPU")
    if storage.device.type != "cuda":
        reason = f"torch operators serve every device and dtype, here {storage.device.type}"
        return Selection(TorchPagedAttention(storage, shape), reason)
    refusals: list[str] = []
    for name, make in GPU_BACKENDS.items():
        try:
            return Selection(make(storage, shape), "; ".join(("the first that serves on this GPU", *refusals)))
        except ValueError as error:
            refusals.append(f"{name} cannot: {error}")
    return Selection(TorchPagedAttention(storage, shape), "; ".join(("torch operators serve every GPU", *refusals)))
