"""What serves a decoder on a GPU besides attention: the fused forward pass, and recorded decode steps.

Decides which of them a model gets, and what memory they take. Imports triton only when the triton backend serves, so
never on a CPU.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from engine.attention.flash_attn_paged import FlashAttnAttention
from engine.attention.flashinfer_paged import WORKSPACE_BYTES, FlashInferAttention
from engine.attention.interface import AttentionBackend, CapturableAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.graphs import CudaRecorder, DecodeGraphs, reserved_bytes
from engine.models.decoder import Decoder
from kvpool.table import blocks_for

NOT_RECORDED: Mapping[str, int] = MappingProxyType(
    {FlashInferAttention.name: WORKSPACE_BYTES, FlashAttnAttention.name: 0, TorchPagedAttention.name: 0}
)
"""Backends for GPUs whose decode steps run eagerly, and the bytes that each keeps on the device."""


def fused(decoder: Decoder, backend: AttentionBackend) -> Decoder:
    """The decoder's fused twin where `backend` goes with it, else the decoder itself."""
    if backend.name != "triton":
        return decoder
    from engine.models.triton_layers import FusedDecoder

    return FusedDecoder.of(decoder)


def decode_graphs(
    decoder: Decoder, backend: AttentionBackend, config: EngineConfig, max_model_len: int
) -> DecodeGraphs | None:
    """Recordings to be made of the decoder's decode steps; None where they run eagerly."""
    if not _records(config, decoder.device) or not isinstance(backend, CapturableAttention):
        return None
    max_blocks = blocks_for(max_model_len, config.block_size)
    return DecodeGraphs(decoder, backend, CudaRecorder(), config.max_num_seqs, max_blocks)


def graph_bytes(decoder: Decoder, config: EngineConfig, max_model_len: int) -> int:
    """Device memory that `decode_graphs` or the backend itself may take, before there is a backend."""
    if config.attention_backend in NOT_RECORDED:
        return NOT_RECORDED[config.attention_backend]
    if not _records(config, decoder.device):
        return 0
    max_blocks = blocks_for(max_model_len, config.block_size)
    return reserved_bytes(decoder.spec, decoder.dtype, config.max_num_seqs, max_blocks)


def _records(config: EngineConfig, device: torch.device) -> bool:
    return device.type == "cuda" and not config.enforce_eager
