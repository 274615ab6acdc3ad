"""GGUF types that are kept: what `gguf_forms` reads is, number for number, what the gguf library dequantizes."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from engine.quant.affine import AffineWeight, DenseForm, dense
from engine.weights.gguf import GGUFCheckpoint
from engine.weights.gguf_forms import STORED_FORMS, decode_rows
from engine.weights.gguf_header import GGUFHeader, GGUFTensorInfo

NAME = "model.layers.0.self_attn.q_proj.weight"


def random_blocks(kind: Quant, num_rows: int, num_blocks: int) -> np.ndarray:
    """Any bytes, but no infinities or NaN: the high bytes of half floats stay small."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    encoded = np.random.default_rng(3).integers(0, 256, (num_rows, num_blocks * block_bytes), dtype=np.uint8)
    if kind in (Quant.F32, Quant.F16, Quant.BF16):
        return encoded & 0x3F
    blocks = encoded.reshape(num_rows, num_blocks, block_bytes)
    halves = [208] if kind == Quant.Q6_K else [0, 2]
    for at in halves:
        blocks[..., at + 1] &= 0x3F
    return encoded


@pytest.mark.parametrize("kind", STORED_FORMS, ids=lambda kind: kind.name)
def test_every_kept_type_means_what_the_library_says(kind: Quant) -> None:
    encoded = random_blocks(kind, 20, 3)
    rows = decode_rows(kind, encoded)
    assert np.array_equal(dense(rows).float().numpy(), gguf.quants.dequantize(encoded, kind))
    form = STORED_FORMS[kind]
    assert (rows.form if isinstance(rows, AffineWeight) else DenseForm(rows.dtype)) == form


@pytest.mark.parametrize(
    "kind", [Quant.Q4_0, Quant.Q4_K, Quant.Q6_K, Quant.Q8_0, Quant.F16], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_in_pieces_and_in_canonical_order(kind: Quant, architecture: str, tmp_path: Path) -> None:
    num_columns = max(256, gguf.GGML_QUANT_SIZES[kind][0])
    encoded = random_blocks(kind, 48, num_columns // gguf.GGML_QUANT_SIZES[kind][0])
    (tmp_path / "w").write_bytes(encoded.tobytes())
    info = GGUFTensorInfo((48, num_columns), kind.value, tmp_path / "w", 0)
    header = GGUFHeader({"general.architecture": architecture}, {"blk.0.attn_q.weight": info})
    checkpoint = GGUFCheckpoint(header, head_dim=16)
    whole = torch.empty(48, num_columns)
    checkpoint.copy_into(NAME, whole)
    assert checkpoint.form(NAME) == STORED_FORMS[kind]
    pieces = [dense(checkpoint.read(NAME, start, end)).float() for start, end in ((0, 5), (5, 33), (33, 48))]
    assert torch.equal(torch.cat(pieces), whole)


def test_other_types_are_read_as_float32(tmp_path: Path) -> None:
    encoded = random_blocks(Quant.Q3_K, 4, 2)
    (tmp_path / "w").write_bytes(encoded.tobytes())
    info = GGUFTensorInfo((4, 512), Quant.Q3_K.value, tmp_path / "w", 0)
    checkpoint = GGUFCheckpoint(GGUFHeader({"general.architecture": "qwen2"}, {"output.weight": info}), head_dim=8)
    assert checkpoint.form("lm_head.weight") == DenseForm(torch.float32)
    rows = checkpoint.read("lm_head.weight", 1, 3)
    assert isinstance(rows, torch.Tensor)
    expected = gguf.quants.dequantize(encoded, Quant.Q3_K)[1:3]
    assert np.array_equal(rows.numpy(), expected, equal_nan=True)
