"""Parameters stored for the native CPU kernels: every matrix packed, in the smallest form that keeps its values.

    quantization   quantized tensors          float tensors
    auto           kept as they are stored    bfloat16 or float16 where that loses nothing, else float32
    none           widened to float32         the same
    int8, int4     rounded anew               rounded to 8 or 4 bits in groups of 32
    int4_g128      rounded anew               rounded to 4 bits in groups of 128, or of 64 or 32 where 128 do not fit

Where another dtype than float32 is asked for, float tensors and what is widened are rounded to it; vectors never are.

Embedding and head keep 8 bits in groups of 32 under both int4: they are the most sensitive matrices. Products with
quantized matrices round their inputs, too, and multiply integers: to 8 bits under int8, else to 16, where little is
lost. All other arithmetic is float32.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.models.layers import Embedding, Linear
from engine.models.parameters import TensorPlace
from engine.quant.affine import (
    AffineForm,
    AffineWeight,
    DenseForm,
    Form,
    dense,
    half_scales_suffice,
    is_stored_as,
    quantize,
)
from engine.quant.arena import WeightArena, on_meta
from engine.quant.groups import GROUP_SIZE, largest_group
from engine.quant.heights import measured_heights
from engine.quant.panels import PackedEmbedding, PackedLinear, StackedLinear
from engine.weights.assign import Place
from engine.weights.checkpoint import Checkpoint

QUANTIZED_BITS = {"int8": 8, "int4": 4, "int4_g128": 4}
"""The quantizations that round at load, and to how many bits."""

FLOAT32 = DenseForm(torch.float32)
BFLOAT16 = DenseForm(torch.bfloat16)

_MAX_CHUNK_ELEMENTS = 4 * 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Rows `first_row ...` of a packed matrix, filled some rows at a time."""

    matrix: PackedLinear
    first_row: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (self.num_rows, self.matrix.num_inputs)

    def fill(self, checkpoint: Checkpoint, name: str) -> None:
        """Read rows, bring them into the matrix's form, pack them."""
        for start, end in _chunks(*self.shape):
            self.matrix.fill(self.first_row + start, _converted(checkpoint.read(name, start, end), self.matrix.form))


class PackedParameters:
    """Packed matrices for the weights of `checkpoint`; `Parameters`. Their forms follow from what is stored there.

    `dtype` is what float tensors are rounded to; float32: not at all. With `device` "meta" nothing is allocated and no
    weight is read, so bytes that only reading can save are counted.
    """

    def __init__(
        self, checkpoint: Checkpoint, quantization: str, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._stored = set(checkpoint.names())
        self._quantization = quantization
        self.device = device
        self.places: dict[str, Place] = {}
        self.nbytes = 0
        self._matrices: list[PackedLinear] = []
        self._zeros = on_meta if device.type == "meta" else WeightArena().zeros

    def vector(self, name: str, size: int) -> Tensor:
        """See `Parameters`."""
        tensor = torch.empty(size, dtype=torch.float32, device=self.device)
        self.places[name] = TensorPlace(tensor)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, name: str, num_outputs: Mapping[str, int], num_inputs: int, bias: bool) -> Linear:
        """See `Parameters`. Neighbours of one form become one matrix."""
        forms = {part: self._form(f"{name}.{part}.weight", num_inputs, self._bits) for part in num_outputs}
        matrices = []
        for form, parts in groupby(num_outputs, forms.__getitem__):
            matrices.append(
                self._matrix(form, {f"{name}.{part}": num_outputs[part] for part in parts}, num_inputs, bias)
            )
        return matrices[0] if len(matrices) == 1 else StackedLinear(tuple(matrices))

    def embedding(self, name: str, num_rows: int, size: int) -> tuple[Embedding, Linear]:
        """See `Parameters`."""
        matrix = self.head(name.removesuffix(".weight"), num_rows, size)
        return PackedEmbedding(matrix), matrix

    def head(self, name: str, num_outputs: int, num_inputs: int) -> PackedLinear:
        """See `Parameters`."""
        form = self._form(f"{name}.weight", num_inputs, 8 if self._bits else None)
        return self._matrix(form, {name: num_outputs}, num_inputs, bias=False)

    @property
    def _bits(self) -> int | None:
        """To round to, if at all."""
        return QUANTIZED_BITS.get(self._quantization)

    def _matrix(self, form: Form, num_rows: Mapping[str, int], num_inputs: int, bias: bool) -> PackedLinear:
        total = sum(num_rows.values())
        matrix = PackedLinear.allocate(form, total, num_inputs, bias, self._zeros)
        first = 0
        for name, count in num_rows.items():
            self.places[f"{name}.weight"] = PackedPlace(matrix, first, count)
            if matrix.bias is not None:
                self.places[f"{name}.bias"] = TensorPlace(matrix.bias[first : first + count])
            first += count
        self.nbytes += matrix.nbytes
        self._matrices.append(matrix)
        return matrix

    def choose_heights(self) -> None:
        """Measure how the kernels are fastest with each quantized form, once all matrices are filled."""
        by_form: dict[AffineForm, list[PackedLinear]] = {}
        for matrix in self._matrices:
            if isinstance(matrix.form, AffineForm):
                by_form.setdefault(matrix.form, []).append(matrix)
        for form, matrices in by_form.items():
            largest = max(matrices, key=lambda matrix: matrix.nbytes)
            shape = (largest.num_outputs, largest.num_inputs)
            alike = [matrix for matrix in matrices if (matrix.num_outputs, matrix.num_inputs) == shape]
            heights = measured_heights(alike)
            _log.debug("products with %s: heights %s", form, heights)
            for matrix in matrices:
                matrix.set_heights(heights)

    def _form(self, name: str, num_inputs: int, bits: int | None) -> Form:
        """The form to keep a tensor in. A tensor that is missing or misshapen is told later, when all are assigned."""
        if name not in self._stored or self._checkpoint.shape(name)[1:] != (num_inputs,):
            return FLOAT32
        if bits is not None and num_inputs % GROUP_SIZE == 0:
            group = largest_group(num_inputs) if bits == 4 and self._quantization == "int4_g128" else GROUP_SIZE
            halves = self._holds(name, lambda rows: half_scales_suffice(rows, bits, group))
            scale_dtype = torch.float16 if halves else torch.float32
            input_bits = 8 if self._quantization == "int8" else 16
            return AffineForm(bits, group, scale_dtype, has_minimums=bits == 4, input_bits=input_bits)
        stored = self._checkpoint.form(name)
        if isinstance(stored, AffineForm):
            keeps = self._quantization == "auto" and num_inputs % GROUP_SIZE == 0
            return stored if keeps else DenseForm(self.dtype)
        if self.dtype != torch.float32:
            return DenseForm(self.dtype)
        if stored == FLOAT32 and self._holds(name, _is_bfloat16):
            return BFLOAT16
        return stored

    def _holds(self, name: str, predicate: Callable[[Tensor], bool]) -> bool:
        """Whether all of a stored matrix satisfies `predicate`; False where nothing is read."""
        if self.device.type == "meta":
            return False
        chunks = _chunks(*self._checkpoint.shape(name))
        return all(predicate(dense(self._checkpoint.read(name, start, end))) for start, end in chunks)


def _chunks(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a few million elements each."""
    step = max(1, _MAX_CHUNK_ELEMENTS // num_columns)
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _converted(rows: Tensor | AffineWeight, form: Form) -> Tensor | AffineWeight:
    """Rows in another form: as they are if it is theirs already, else widened and rounded to it."""
    if isinstance(rows, AffineWeight) and is_stored_as(rows, form):
        return rows
    values = dense(rows)
    if isinstance(form, DenseForm):
        return values.to(form.dtype)
    return quantize(values, form.bits, form.scale_dtype, form.group_size)


def _is_bfloat16(values: Tensor) -> bool:
    """Whether bfloat16 holds every float32 of `values` exactly: the lower half of its bits is zero."""
    return not bool((values.contiguous().view(torch.int32) & 0xFFFF).any())
