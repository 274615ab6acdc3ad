"""What is measured at load decides how products are computed, never what comes out; and not on a whim."""

import itertools
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from engine.config import no_progress
from engine.models import packed as packed_models
from engine.models.load import load_decoder
from engine.models.native_decoder import NativeDecoder
from engine.native import NativeUnavailable, load_native
from engine.quant.affine import AffineWeight, quantize
from engine.quant.heights import SLICED, fastest, measured_heights
from engine.quant.panels import NUM_HEIGHTS, PackedLinear, packed
from engine.weights.checkpoint import resolve_model
from tests.fakes.tiny_gguf import write_gguf
from tests.fakes.tiny_models import make_tiny_model

try:
    load_native()
except NativeUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

HEIGHTS = (0, 1, 2, 3, 4, SLICED)


def matrix(bits: int, input_bits: int = 16) -> PackedLinear:
    return packed(quantize(torch.randn(70, 576), bits, torch.float16), torch.randn(70), input_bits)


@pytest.mark.parametrize(("bits", "input_bits"), [(4, 16), (8, 16), (8, 8)], ids=str)
def test_every_height_gives_the_same_bits(bits: int, input_bits: int) -> None:
    linear = matrix(bits, input_bits)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 17, 40, 97):
        x = torch.randn(rows, 576)
        results = []
        for height in HEIGHTS:
            linear.set_heights((height,) * NUM_HEIGHTS)
            results.append(linear(x))
        assert all(torch.equal(result, results[0]) for result in results), rows


def test_every_height_with_fine_groups_and_minimums() -> None:
    affine = quantize(torch.randn(40, 288), 8)
    scales = affine.scales.repeat_interleave(2, 1)
    linear = packed(AffineWeight(8, affine.q, scales, torch.randn_like(scales)))
    x = torch.randn(21, 288)
    results = []
    for height in HEIGHTS:
        linear.set_heights((height,) * NUM_HEIGHTS)
        results.append(linear(x))
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    assert fastest({0: 1.0, 2: 0.96, SLICED: 1.2}) == 0
    assert fastest({0: 1.0, 2: 0.94, SLICED: 0.9}) == SLICED
    assert fastest({0: 1.0, 2: 1.5}) == 0


def test_measured_by_turns_and_only_what_may_be_faster() -> None:
    """A clock on which each call takes longer than the one before: the first, the default, wins everywhere."""
    times = itertools.accumulate(itertools.count())
    assert measured_heights([matrix(4)], clock=lambda: float(next(times))) == (0,) * NUM_HEIGHTS
    assert set(measured_heights([matrix(4), matrix(4)])) <= {0, 2, 4, SLICED}


def test_a_part_of_a_matrix_is_some_of_its_panels() -> None:
    linear = matrix(4)
    x = torch.randn(3, 576)
    for first, count, columns in ((0, 2, slice(0, 64)), (1, 1, slice(32, 64)), (1, 2, slice(32, 70))):
        part = linear.part(first, count)
        part.set_heights((SLICED,) * NUM_HEIGHTS)
        assert torch.equal(part(x), linear(x)[:, columns])
    assert list(linear.native.heights) == [0] * NUM_HEIGHTS


def test_loading_measures_each_form_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[PackedLinear] = []

    def measure(matrices: list[PackedLinear]) -> tuple[int, ...]:
        measured.append(matrices[0])
        return (SLICED,) * NUM_HEIGHTS

    monkeypatch.setattr(packed_models, "measured_heights", measure)
    path = write_gguf(make_tiny_model("llama", tmp_path), tmp_path / "m.gguf", qtype=Quant.Q4_1)
    decoder = load_decoder(resolve_model(str(path)), torch.float32, torch.device("cpu"), no_progress)
    assert isinstance(decoder, NativeDecoder)
    assert len({linear.form for linear in measured}) == len(measured) > 0
    for layer in decoder.layers:
        assert isinstance(layer.mlp.down, PackedLinear)
        assert list(layer.mlp.down.native.heights) == [SLICED] * NUM_HEIGHTS
