"""Weights packed for `csrc/matmul.cpp`, and the product with them. The layout is drawn in `csrc/matmul.h`.

Products take and give float32. With a dense form they equal those with the matrix itself up to the order of summation.
With a quantized form they equal those of rounded inputs with the dequantized matrix: each group of inputs that meets
one scale is rounded to multiples of its largest magnitude / 32767 (or / 127), and integers are multiplied.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.native import load_native
from engine.quant.affine import AffineForm, AffineWeight, DenseForm, Form, is_stored_as
from engine.quant.arena import Zeros, on_heap
from engine.quant.groups import GROUP_SIZE

PANEL_SIZE = 32
NUM_HEIGHTS = 8
"""Ranges of numbers of rows: 1, 2, 3-4, 5-8, ... 33-64, and more."""
_DENSE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AFFINE_CODES = {(8, 16): 3, (4, 16): 4, (8, 8): 5}
"""Bits of weights and inputs -> the kernels' number."""
_SCALE_CODES = {torch.float32: -1, torch.float16: -2}


class NativeMatrix(ctypes.Structure):
    """`Matrix` of `csrc/matmul.h`, field by field. Points into tensors that somebody else keeps alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "mins", "bias")),
        *((name, ctypes.c_int32) for name in ("num_inputs", "num_outputs", "format", "half_scales", "group")),
        ("heights", ctypes.c_uint8 * NUM_HEIGHTS),
    )


class _MatmulArgs(ctypes.Structure):
    """`MatmulArgs` of `csrc/matmul.cpp`."""

    _fields_ = (
        ("matrix", NativeMatrix),
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "num_threads")),
    )


class _LookUpArgs(ctypes.Structure):
    """`LookUpArgs` of `csrc/matmul.cpp`."""

    _fields_ = (
        ("matrix", NativeMatrix),
        *((name, ctypes.c_void_p) for name in ("ids", "y")),
        ("count", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


class _PackArgs(ctypes.Structure):
    """`PackArgs` of `csrc/pack.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("source_stride", "first_row")),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_columns", "padded_columns", "format")),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """`x @ weight.T + bias` with a packed weight; takes and gives float32. Made empty by `allocate`, then filled.

    Attributes:
        num_outputs, num_inputs: of the matrix.
        weights, scales, minimums: see `csrc/matmul.h`.
        bias: `[num_outputs]` float32 or None.
        native: the same as the kernels see it.
    """

    num_outputs: int
    num_inputs: int
    form: Form
    weights: Tensor
    scales: Tensor | None
    minimums: Tensor | None
    bias: Tensor | None
    native: NativeMatrix
    kernels: ctypes.CDLL = field(repr=False)

    @classmethod
    def allocate(
        cls, form: Form, num_outputs: int, num_inputs: int, bias: bool = False, zeros: Zeros = on_heap
    ) -> "PackedLinear":
        """Zeros to be filled, from where `zeros` takes them.

        Raises:
            ValueError: quantized, and the inputs are not whole groups.
            NativeUnavailable: there are no kernels here.
        """
        num_panels, num_groups = -(-num_outputs // PANEL_SIZE), -(-num_inputs // GROUP_SIZE)
        size = num_panels * num_groups * GROUP_SIZE * PANEL_SIZE
        scales = minimums = None
        if isinstance(form, DenseForm):
            weights = zeros(size, form.dtype)
        else:
            if num_inputs % (whole := max(GROUP_SIZE, form.group_size)):
                raise ValueError(f"{num_inputs} inputs are not whole groups of {whole}")
            weights = zeros(size * form.bits // 8, torch.uint8)
            scales = zeros(size // form.group_size, form.scale_dtype)
            minimums = zeros(size // form.group_size, form.scale_dtype) if form.has_minimums else None
        biases = zeros(num_outputs, torch.float32) if bias else None
        tensors = (weights, scales, minimums, biases)
        native = NativeMatrix(
            *(None if part is None else part.data_ptr() for part in tensors),
            *(num_inputs, num_outputs, _code(form), int(scales is not None and scales.dtype == torch.float16)),
            form.group_size if isinstance(form, AffineForm) else 0,
        )
        return cls(num_outputs, num_inputs, form, *tensors, native, load_native())

    @property
    def nbytes(self) -> int:
        """Bytes that are stored, and that a product reads."""
        parts = (self.weights, self.scales, self.minimums, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def fill(self, first_row: int, rows: Tensor | AffineWeight) -> None:
        """Put rows `[n, in]`, in this matrix's own form, where they belong."""
        if isinstance(rows, AffineWeight):
            assert is_stored_as(rows, self.form), f"{rows.form} into {self.form}"
            assert self.scales is not None
            shifted = rows.q + 8 if rows.bits == 4 and rows.minimums is None else rows.q
            self._pack(shifted, self.weights, first_row, self.native.format)
            self._pack(rows.scales, self.scales, first_row, _SCALE_CODES[rows.scales.dtype])
            if rows.minimums is not None and self.minimums is not None:
                self._pack(rows.minimums, self.minimums, first_row, _SCALE_CODES[rows.minimums.dtype])
        else:
            assert DenseForm(rows.dtype) == self.form, f"{rows.dtype} into {self.form}"
            self._pack(rows, self.weights, first_row, self.native.format)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`, float32."""
        y = torch.empty((x.shape[0], self.num_outputs), dtype=torch.float32)
        self.multiply_into(x, y)
        return y

    def multiply_into(self, x: Tensor, y: Tensor, num_threads: int | None = None) -> None:
        """The same into `y` `[T, out]`, which may be some columns of a wider tensor. By default on torch's threads."""
        assert x.dtype == y.dtype == torch.float32, "packed products are float32"
        assert x.shape[1] == self.num_inputs, f"{x.shape[1]} inputs for a matrix of {self.num_inputs}"
        if x.stride(-1) != 1:
            x = x.contiguous()
        args = _MatmulArgs(
            *(self.native, x.data_ptr(), y.data_ptr(), x.stride(0), y.stride(0)),
            *(x.shape[0], num_threads or torch.get_num_threads()),
        )
        if self.kernels.quire_matmul(ctypes.byref(args)) != 0:
            raise TypeError(f"no native product for {self.form}")

    def set_heights(self, heights: Sequence[int]) -> None:
        """How to go about products of so many rows, see `csrc/dot.h`: one for each of `NUM_HEIGHTS` ranges."""
        self.native.heights[:] = heights

    @property
    def num_panels(self) -> int:
        """Of `PANEL_SIZE` outputs each."""
        return -(-self.num_outputs // PANEL_SIZE)

    def part(self, first_panel: int, num_panels: int) -> "PackedLinear":
        """Some panels as a matrix over the same memory."""
        first = first_panel * PANEL_SIZE
        tensors = (self.weights, self.scales, self.minimums, self.bias)
        units = (*[self.num_panels] * 3, self.num_outputs)
        firsts = (*[first_panel] * 3, first)
        native = NativeMatrix.from_buffer_copy(self.native)
        for name, tensor, unit, start in zip(
            ("weights", "scales", "mins", "bias"), tensors, units, firsts, strict=True
        ):
            if tensor is not None:
                setattr(native, name, tensor.data_ptr() + tensor.nbytes // unit * start)
        native.num_outputs = min(self.num_outputs - first, num_panels * PANEL_SIZE)
        return replace(self, num_outputs=native.num_outputs, native=native)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding: `[T]` int64 -> `[T, in]` float32.

        Raises:
            IndexError: an id outside the matrix.
        """
        ids = ids.contiguous()
        y = torch.empty((ids.shape[0], self.num_inputs), dtype=torch.float32)
        args = _LookUpArgs(self.native, ids.data_ptr(), y.data_ptr(), ids.shape[0], torch.get_num_threads())
        status = self.kernels.quire_look_up(ctypes.byref(args))
        if status == 2:
            raise IndexError(f"a token id is outside the vocabulary of {self.num_outputs}")
        if status != 0:
            raise TypeError(f"no native look-up for {self.form}")
        return y

    def _pack(self, source: Tensor, target: Tensor, first_row: int, code: int) -> None:
        num_rows, num_columns = source.shape
        assert first_row + num_rows <= self.num_outputs
        source = source.contiguous()
        padded = -(-num_columns // GROUP_SIZE) * GROUP_SIZE if target is self.weights else num_columns
        args = _PackArgs(
            *(source.data_ptr(), target.data_ptr(), source.stride(0), first_row),
            *(num_rows, num_columns, padded, code, torch.get_num_threads()),
        )
        if self.kernels.quire_pack(ctypes.byref(args)) != 0:
            raise TypeError(f"no packing for {self.form}")


@dataclass(frozen=True, slots=True, eq=False)
class StackedLinear:
    """Packed matrices with the same input, their outputs side by side: a fused projection of parts of unlike forms."""

    parts: Sequence[PackedLinear]

    @property
    def nbytes(self) -> int:
        """Bytes that are stored, and that a product reads."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, sum of outputs]`, float32."""
        y = torch.empty((x.shape[0], sum(part.num_outputs for part in self.parts)), dtype=torch.float32)
        columns = torch.split(y, [part.num_outputs for part in self.parts], dim=1)
        for part, some in zip(self.parts, columns, strict=True):
            part.multiply_into(x, some)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding:
    """Token ids to rows of a packed matrix, widened when they are looked up."""

    matrix: PackedLinear

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, hidden]` float32. Raises IndexError for an id outside the vocabulary."""
        return self.matrix.look_up(token_ids)


def packed(rows: Tensor | AffineWeight, bias: Tensor | None = None, input_bits: int = 16) -> PackedLinear:
    """A whole matrix `[out, in]` packed in its own form."""
    num_outputs, num_inputs = rows.q.shape if isinstance(rows, AffineWeight) else rows.shape
    form: Form = DenseForm(rows.dtype) if isinstance(rows, Tensor) else replace(rows.form, input_bits=input_bits)
    matrix = PackedLinear.allocate(form, num_outputs, num_inputs, bias is not None)
    matrix.fill(0, rows)
    if bias is not None and matrix.bias is not None:
        matrix.bias.copy_(bias)
    return matrix


def _code(form: Form) -> int:
    """The kernels' number of a form."""
    if isinstance(form, AffineForm):
        return _AFFINE_CODES[form.bits, form.input_bits]
    return _DENSE_CODES[form.dtype]
