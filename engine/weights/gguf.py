"""Weights from GGUF: every tensor type that the `gguf` library can dequantize, a few megabytes at a time.

Knows files, names and one convention: files of architecture `llama` hold the rows of their query and key
projections in another order, which is undone here. Knows nothing of what the tensors are used for.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.errors import LoadError
from engine.quant.affine import AffineWeight, Form
from engine.weights.gguf_forms import FLOAT32, STORED_FORMS, decode_rows
from engine.weights.gguf_header import GGUFHeader, GGUFTensorInfo
from engine.weights.names import canonical_name

_PERMUTED_ARCHITECTURES = ("llama",)
_CONSUMED_ELSEWHERE = ("rope_freqs.weight",)
"""Tensors that are settings, not weights: the model's specification has read them."""
_MAX_CHUNK_ELEMENTS = 4 * 1024 * 1024

RowOrder = npt.NDArray[np.int64]


class GGUFCheckpoint:
    """The tensors of a GGUF file under canonical names; a `Checkpoint`.

    Args:
        header: of the file, or of all parts of a split model.
        head_dim: of the model; needed to undo the row order of `llama` files.
    """

    def __init__(self, header: GGUFHeader, head_dim: int) -> None:
        self._permuted = header.architecture in _PERMUTED_ARCHITECTURES
        self._head_dim = head_dim
        self._infos: dict[str, GGUFTensorInfo] = {}
        for name, info in header.tensors.items():
            if name not in _CONSUMED_ELSEWHERE:
                self._infos[canonical_name(name)] = info

    def names(self) -> Iterable[str]:
        """All tensors, each once."""
        return self._infos.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape once dequantized, outermost dimension first."""
        return self._infos[name].shape

    def copy_into(self, name: str, target: Tensor) -> None:
        """Dequantize the tensor into `target`, in chunks of whole rows."""
        info = self._infos[name]
        rows = _encoded_rows(name, info)
        order = self._row_order(name, info.shape[0])
        if len(info.shape) == 1:
            values = _decode(name, info, rows)[0]
            target.copy_(torch.from_numpy(values if order is None else values[order]))
            return
        targets = target.reshape(len(rows), info.shape[-1])
        step = max(1, _MAX_CHUNK_ELEMENTS // info.shape[-1])
        for start in range(0, len(rows), step):
            encoded = rows[start : start + step] if order is None else rows[order[start : start + step]]
            targets[start : start + step].copy_(torch.from_numpy(_decode(name, info, encoded)))

    def form(self, name: str) -> Form:
        """The stored form of the types that `gguf_forms` keeps; float32 for all others."""
        return STORED_FORMS.get(_encoding(name, self._infos[name]), FLOAT32)

    def read(self, name: str, start: int, end: int) -> Tensor | AffineWeight:
        """Rows `start : end` of a matrix, in the form that `form` told."""
        info = self._infos[name]
        rows, order = _encoded_rows(name, info), self._row_order(name, info.shape[0])
        encoded = rows[start:end] if order is None else rows[order[start:end]]
        encoding = _encoding(name, info)
        if encoding in STORED_FORMS:
            return decode_rows(encoding, encoded)
        return torch.from_numpy(_decode(name, info, encoded))

    def _row_order(self, name: str, num_rows: int) -> RowOrder | None:
        """Which stored row each canonical row is; None when they agree.

        The rotation pairs rows `(i, i + head_dim / 2)` of a head in the canonical order. llama.cpp's converter
        stores the two of a pair side by side, `(2 i, 2 i + 1)`, in files of architecture `llama`, biases alike.
        """
        if not self._permuted or not name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            return None
        if num_rows % self._head_dim:
            raise LoadError(f"tensor {name}: {num_rows} rows are not whole heads of {self._head_dim}")
        stored = np.arange(num_rows, dtype=np.int64).reshape(-1, self._head_dim // 2, 2)
        return stored.swapaxes(1, 2).reshape(-1)


def _encoded_rows(name: str, info: GGUFTensorInfo) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, mapped: `[rows, bytes per row]`; a vector is one row.

    Mapped copy-on-write, because torch wants memory that it could write to.
    """
    block_elements, block_bytes = GGML_QUANT_SIZES[_encoding(name, info)]
    num_columns = info.shape[-1]
    if num_columns % block_elements:
        raise LoadError(f"tensor {name}: {num_columns} columns are not whole blocks of {block_elements}")
    row_bytes = num_columns // block_elements * block_bytes
    num_rows = math.prod(info.shape[:-1])
    if info.offset_bytes + num_rows * row_bytes > info.path.stat().st_size:
        raise LoadError(f"{info.path}: the file ends inside tensor {name}")
    return np.memmap(info.path, np.uint8, "c", info.offset_bytes, (num_rows, row_bytes))


def _decode(name: str, info: GGUFTensorInfo, encoded: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """`[rows, bytes per row]` -> `[rows, columns]` float32."""
    encoding = _encoding(name, info)
    try:
        decoded: npt.NDArray[np.float32] = dequantize(encoded, encoding)
    except NotImplementedError as error:
        raise LoadError(f"tensor {name}: cannot decode GGUF type {encoding.name}") from error
    return decoded


def _encoding(name: str, info: GGUFTensorInfo) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(info.ggml_type)
    except ValueError as error:
        raise LoadError(f"tensor {name}: unknown GGUF type {info.ggml_type}") from error
