"""Eight-bit codes and their scales: how far a number may move, and what must not break."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.quant import CODE_DTYPES, LARGEST_CODE, MAX_SCALE, dequantize, quantize

DTYPES = list(LARGEST_CODE)
heads = st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8)


def round_trip(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(*quantize(values, dtype))


def test_every_offered_cache_has_codes() -> None:
    assert set(CODE_DTYPES.values()) == set(LARGEST_CODE)


@settings(deadline=None)
@given(heads)
def test_int8_moves_no_number_by_more_than_half_a_step(values: list[float]) -> None:
    x = torch.tensor(values)
    codes, scales = quantize(x, torch.int8)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float16
    # rounding the scale down to float16 can leave the largest number up to 2^-11 * 127 steps above the largest code
    limit = 0.5 * scales.float() * (1 + 1e-5) + 127 * 2**-24
    assert (dequantize(codes, scales) - x).abs().max() <= limit


@settings(deadline=None)
@given(heads)
def test_fp8_keeps_four_significant_bits(values: list[float]) -> None:
    x = torch.tensor(values)
    _, scales = quantize(x, torch.float8_e4m3fn)
    step = scales.float() * 2**-9  # of the subnormal codes
    # a scale that is a float16 subnormal itself may miss the head's largest number by half of 2^-24, 448 times over
    limit = torch.maximum(x.abs() * 2**-4, step / 2) * (1 + 1e-3) + 448 * 2**-24
    assert ((round_trip(x, torch.float8_e4m3fn) - x).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_has_its_own_scale(dtype: torch.dtype) -> None:
    """A loud head next to a quiet one does not drown it."""
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e-3, 1e3])[:, None]
    codes, scales = quantize(x, dtype)
    assert scales.shape == (5, 3)
    alone = torch.stack([round_trip(x[:, head], dtype) for head in range(3)], dim=1)
    assert torch.equal(dequantize(codes, scales), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_zeros_and_tiny_numbers_become_zero_and_nothing_worse(dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.zeros(2, 8, dtype=source)
    x[1] = 1e-7
    assert (round_trip(x, dtype)[0] == 0).all()
    assert (round_trip(x, dtype)[1].abs() <= 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_becomes_the_largest_number_and_nan_stays(dtype: torch.dtype) -> None:
    x = torch.tensor([[math.inf, 1.0], [-math.inf, 1.0], [math.nan, 1.0], [2.0, 1.0]])
    got = round_trip(x, dtype)
    largest = MAX_SCALE * LARGEST_CODE[dtype]
    assert got[:2, 0].tolist() == [largest, -largest]
    assert got[2].isnan().any()
    assert got[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_number_keeps_its_place(dtype: torch.dtype) -> None:
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    error = (round_trip(x, dtype) - x).abs().amax(dim=1) / x.abs().amax(dim=1)
    assert error.max() <= (0.5 / 127 if dtype == torch.int8 else 2**-4) * 1.001
