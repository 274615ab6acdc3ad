"""Packed products against float64: every form, every kernel path, odd shapes. Quantized forms against the dequantized
matrix times inputs that were rounded by the plain code here.
"""

import pytest
import torch
from torch import Tensor

from engine.native import NativeUnavailable, load_native
from engine.quant.affine import AffineForm, AffineWeight, DenseForm, half_scales_suffice, quantize
from engine.quant.arena import on_meta
from engine.quant.groups import largest_group
from engine.quant.panels import PackedEmbedding, PackedLinear, StackedLinear, packed

try:
    load_native()
except NativeUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

FORMS = [
    *("float32", "bfloat16", "float16"),
    *("int8", "int8 half", "int8 min", "int8 fine", "int8 fine min half"),
    *("int4", "int4 half", "int4 symmetric", "int4 symmetric half"),
    *("int4 wide", "int4 wide half"),
]
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 97, 200]


def stored_as(form: str, weight: Tensor) -> Tensor | AffineWeight:
    """A matrix like `weight` in the form of that name. Quantized ones have arbitrary scales."""
    if form in ("float32", "bfloat16", "float16"):
        return weight.to(getattr(torch, form))
    group_size = largest_group(weight.shape[1]) if "wide" in form else 32
    affine = quantize(weight, 8 if form.startswith("int8") else 4, group_size=group_size)
    scales, minimums = affine.scales, affine.minimums
    if "fine" in form:
        scales = scales.repeat_interleave(2, 1) * torch.rand(scales.shape[0], scales.shape[1] * 2)
    if "min" in form.split():
        minimums = torch.randn_like(scales)
    q = affine.q
    if "symmetric" in form:
        q, minimums = q - 8, None
    if "half" in form:
        scales, minimums = scales.half(), None if minimums is None else minimums.half()
    return AffineWeight(affine.bits, q, scales, minimums)


def meaning(rows: Tensor | AffineWeight) -> Tensor:
    return (rows.dequantize() if isinstance(rows, AffineWeight) else rows).double()


def rounded(x: Tensor, form: AffineForm) -> Tensor:
    """`x` as a product with a matrix of that form takes it, in float64: whole multiples of a scale for each group."""
    largest = 127 if form.input_bits == 8 else 32767
    grouped = x.view(x.shape[0], x.shape[1] // form.group_size, form.group_size)
    scales = grouped.abs().amax(-1, keepdim=True) / largest
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    codes = torch.round(grouped / torch.where(scales == 0, 1.0, scales))
    return (codes.double() * scales.double()).view(x.shape)


def expected(linear: PackedLinear, stored: Tensor | AffineWeight, x: Tensor) -> Tensor:
    """`x @ weight.T`, float64."""
    inputs = rounded(x, linear.form) if isinstance(linear.form, AffineForm) else x.double()
    return inputs @ meaning(stored).T


@pytest.mark.parametrize("shape", [(48, 64), (50, 96), (1, 32), (33, 288), (200, 576), (40, 384)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_product_equals_that_of_the_dequantized_matrix(form: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(FORMS.index(form))
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    stored = stored_as(form, weight)
    for linear, added in ((packed(stored, bias), bias.double()), (packed(stored), 0.0)):
        for rows in ROWS:
            x = torch.randn(rows, shape[1])
            torch.testing.assert_close(linear(x).double(), expected(linear, stored, x) + added, atol=3e-4, rtol=1e-5)
            torch.testing.assert_close(linear(x).double(), x.double() @ meaning(stored).T + added, atol=3e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(48, 64), (1, 32), (33, 288), (200, 576)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "input_bits"), [(8, 8), (8, 16), (4, 16)], ids=str)
def test_products_of_extreme_codes(
    bits: int, input_bits: int, scale_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """A weight or input of the largest magnitude stands in every group, and inputs differ by a million times."""
    torch.manual_seed(1)
    weight = quantize(torch.randn(shape), bits, scale_dtype)
    signs = 1 - 2 * (torch.arange(shape[1]) % 2)
    weight.q[0] = (15 * (signs > 0) if bits == 4 else 127 * signs).to(torch.int8)
    linear = packed(weight, torch.ones(shape[0]), input_bits)
    for rows in ROWS[1:]:
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, shape[1])
        x[:1] = 5.0
        size = x.abs().double() @ meaning(weight).abs().T
        assert ((linear(x).double() - expected(linear, weight, x) - 1).abs() <= 1e-3 + 4e-6 * size).all()


@pytest.mark.parametrize(("bits", "input_bits"), [(8, 8), (8, 16), (4, 16)], ids=str)
def test_products_of_zeros_of_tiny_inputs_and_of_what_is_not_finite(bits: int, input_bits: int) -> None:
    for rows in (5, 40):
        linear = packed(quantize(torch.randn(40, 64), bits), input_bits=input_bits)
        x = torch.randn(rows, 64)
        x[0], x[1, 40], x[2, 3], x[3] = 0.0, torch.nan, torch.inf, 1e-42
        y = linear(x)
        assert (y[0] == 0).all()
        assert y[1:3].isnan().all()
        assert (y[3].abs() < 1e-30).all()
        assert torch.equal(y[4:], linear(x[4:]))


@pytest.mark.parametrize("num_inputs", [1, 31, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inputs_that_are_no_whole_groups(num_inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(20, num_inputs).to(dtype)
    for rows in (1, 9):
        x = torch.randn(rows, num_inputs)
        torch.testing.assert_close(packed(weight)(x), x @ weight.float().T, atol=1e-4, rtol=1e-5)


def test_strided_input_and_no_bias() -> None:
    weight, x = torch.randn(32, 64), torch.randn(7, 128)
    torch.testing.assert_close(packed(weight)(x[:, :64]), x[:, :64] @ weight.T, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(packed(weight)(x[:, ::2]), x[:, ::2] @ weight.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("form", "input_bits"), [*((form, 16) for form in FORMS), ("int8", 8), ("int8 half", 8)])
def test_a_row_is_the_same_bits_whatever_is_beside_it(form: str, input_bits: int) -> None:
    linear = packed(stored_as(form, torch.randn(70, 320)), torch.randn(70), input_bits)
    x = torch.randn(150, 320)
    many = linear(x)
    for first, count in [(0, 1), (7, 1), (3, 2), (90, 3), (149, 1), (10, 4), (11, 5), (40, 20), (0, 97)]:
        assert torch.equal(linear(x[first : first + count]), many[first : first + count]), (first, count)


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4 half"])
def test_threads_do_not_change_a_bit(form: str) -> None:
    linear = packed(stored_as(form, torch.randn(200, 320)))
    x = torch.randn(40, 320)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append((linear(x), linear(x[:1]), linear(x[:3])))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_nan_and_infinity_stay_in_their_row() -> None:
    for form in ("float32", "int4"):
        linear = packed(stored_as(form, torch.randn(32, 64)))
        for rows in (3, 8):
            x = torch.randn(rows, 64)
            x[1, 5] = torch.nan
            y = linear(x)
            assert y[1].isnan().all()
            assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_filled_in_pieces_and_looked_up(form: str) -> None:
    """Pieces that begin and end inside a panel, out of order; every row comes back as it was meant."""
    whole = stored_as(form, torch.randn(70, 96))
    matrix = PackedLinear.allocate(whole.form if isinstance(whole, AffineWeight) else DenseForm(whole.dtype), 70, 96)
    for first, end in ((37, 70), (0, 5), (5, 37)):
        matrix.fill(first, part_of(whole, first, end))
    ids = torch.tensor([69, 0, 15, 16, 17, 36, 37, 0])
    rows = PackedEmbedding(matrix)(ids)
    torch.testing.assert_close(rows.double(), meaning(whole)[ids], atol=1e-6, rtol=1e-6)
    assert torch.equal(matrix(torch.ones(6, 96)), packed(whole)(torch.ones(6, 96)))
    assert PackedEmbedding(matrix)(ids[:0]).shape == (0, 96)
    for wrong in (-1, 70):
        with pytest.raises(IndexError, match="70"):
            matrix.look_up(torch.tensor([0, wrong]))


def part_of(rows: Tensor | AffineWeight, first: int, end: int) -> Tensor | AffineWeight:
    if isinstance(rows, Tensor):
        return rows[first:end]
    low = None if rows.minimums is None else rows.minimums[first:end]
    return AffineWeight(rows.bits, rows.q[first:end], rows.scales[first:end], low)


def test_unlike_parts_stand_side_by_side() -> None:
    parts = [packed(stored_as(form, torch.randn(20 + 7 * i, 64))) for i, form in enumerate(("int4", "float32", "int8"))]
    stacked = StackedLinear(parts)
    for rows in (1, 9):
        x = torch.randn(rows, 64)
        assert torch.equal(stacked(x), torch.cat([part(x) for part in parts], dim=1))
    assert stacked.nbytes == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
def test_quantize_rounds_to_half_a_step(bits: int, scale_dtype: torch.dtype) -> None:
    weight = torch.randn(10, 96)
    affine = quantize(weight, bits, scale_dtype)
    error = (affine.dequantize() - weight).abs().view(10, -1, 32)
    slack = 1e-6 if scale_dtype == torch.float32 else 2e-3
    assert (error <= affine.scales.float().unsqueeze(-1) * (0.501 + 100 * slack) + slack).all()
    assert affine.scales.dtype == scale_dtype


def test_half_scales_suffice_unless_weights_are_tiny_or_huge() -> None:
    for bits in (4, 8):
        assert half_scales_suffice(torch.randn(4, 64), bits)
        assert half_scales_suffice(torch.zeros(4, 64), bits)
        assert not half_scales_suffice(torch.randn(4, 64) * 1e-5, bits)
        assert not half_scales_suffice(torch.randn(4, 64) * 1e7, bits)


def test_the_largest_group_that_fits() -> None:
    assert [largest_group(size) for size in (128, 1536, 576, 96, 32)] == [128, 128, 64, 32, 32]
    affine = quantize(torch.randn(3, 256), 4, group_size=128)
    assert affine.scales.shape == (3, 2)
    assert affine.form.group_size == 128
    tiny = torch.cat([torch.randn(1, 128), torch.randn(1, 32) * 1e-5, torch.randn(1, 96)], 1)
    assert half_scales_suffice(tiny, 4, 128)
    assert not half_scales_suffice(tiny, 4)
    with pytest.raises(ValueError, match="192 inputs are not whole groups of 128"):
        quantize(torch.zeros(3, 192), 4, group_size=128)


def test_quantize_keeps_zeros_and_refuses_ragged_groups() -> None:
    assert torch.equal(quantize(torch.zeros(3, 32), 8).dequantize(), torch.zeros(3, 32))
    assert torch.equal(quantize(torch.zeros(3, 32), 4).dequantize(), torch.zeros(3, 32))
    with pytest.raises(ValueError, match="33 inputs"):
        quantize(torch.zeros(3, 33), 8)
    with pytest.raises(ValueError, match="33 inputs"):
        PackedLinear.allocate(AffineForm(8, 32, torch.float16, False), 3, 33)
    with pytest.raises(ValueError, match="bits"):
        quantize(torch.zeros(3, 32), 5)


def test_stored_bytes() -> None:
    """64 x 320, 4 bits with half scales and minima: half a byte each, 4 bytes a group; also without memory."""
    matrix = packed(stored_as("int4 half", torch.randn(64, 320)))
    assert matrix.nbytes == 64 * 320 // 2 + 64 * 10 * 4
    assert PackedLinear.allocate(matrix.form, 64, 320, zeros=on_meta).nbytes == matrix.nbytes
    assert packed(stored_as("int8 half", torch.randn(64, 320)), torch.zeros(64)).nbytes == 64 * 320 + 64 * (20 + 4)
