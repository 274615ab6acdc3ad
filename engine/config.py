"""The engine's settings, and what it learnt while loading. Torch-free, so that everybody may read it.

Both are frozen: settings are read once and never written; what only loading can tell (how many blocks fit, which
backend serves) comes back as `EngineInfo`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.layout import KV_CACHE_DTYPES, KVLayout

QUANTIZATIONS = ("auto", "none", "int8", "int4", "int4_g128")

Progress = Callable[[str, float], None]
"""Told while loading: the name of the phase, and how much of it is done (0..1)."""


ATTENTION_BACKENDS = ("native", "torch", "reference", "triton", "flashinfer", "flash-attn")
"""Names of those that `engine.attention.select` can make, the preferred of each kind of device first."""


def no_progress(phase: str, fraction: float) -> None:
    """A `Progress` that tells nobody."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load and run a model.

    Attributes:
        model: what was asked for, as the user wrote it; None is the embedded model.
        dtype: of weights and activations; `auto` is the checkpoint's own where the hardware computes it well. With
            native CPU kernels it is of float weights and the KV cache, and activations are float32.
        device: `auto`, or a torch device such as `cpu`, `cuda`, `cuda:1`, `mps`.
        block_size: tokens per KV block.
        num_kv_blocks: exactly so many blocks; overrides the two fields below.
        kv_cache_memory_bytes: as many blocks as fit; None sizes the pool from free memory.
        gpu_memory_utilization: share of the whole GPU that weights, activations and KV together may use.
        max_num_seqs: slots: sequences that run at once.
        max_num_batched_tokens: tokens of one step at most; activation memory is planned for it.
        max_model_len: tokens of one sequence at most; None is the model's own context.
        threads: of the CPU's operators; None is one per core that this process may use.
        seed: of the server, for requests that bring none; the engine itself draws nothing without a request's seed.
        kv_cache_dtype: what keys and values are stored as: `auto` (`dtype`), `fp8` or `int8`.
        attention_backend: `auto` or one of `ATTENTION_BACKENDS`.
        enforce_eager: on a GPU, launch every decode step anew instead of replaying CUDA graphs.
        quantization: of weights: `auto` keeps what the file holds, `none` widens it, `int8` and `int4` round at load in
            groups of 32 inputs, `int4_g128` in groups of 128.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    threads: int | None = None
    seed: int = 0
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        counts = ("block_size", "max_num_seqs", "max_num_batched_tokens")
        optional_counts = ("num_kv_blocks", "kv_cache_memory_bytes", "max_model_len", "threads")
        for name in (*counts, *optional_counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, got {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be {' or '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is.

    Attributes:
        num_blocks: KV blocks in the pool.
        max_model_len: tokens of one sequence at most, after the model's own limit.
        layout: bytes and shape of a KV block.
        dtype, device: as torch writes them, without a `torch.` in front.
        weight_bytes, kv_bytes: allocated.
        kv_dtype: of the elements in the KV cache: `dtype`, or that of codes where the cache is quantized.
        attention_backend, attention_reason: which one serves, and why it was chosen.
    """

    num_blocks: int
    vocab_size: int
    max_model_len: int
    layout: KVLayout
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes: int
    attention_backend: str
    attention_reason: str = ""
    kv_dtype: str = ""
