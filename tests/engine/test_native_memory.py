"""Every kernel at the edges of its buffers: odd sizes, exact allocations; `make sanitize` runs it under sanitizers."""

import itertools

import numpy as np
import pytest
import torch

from engine.attention.interface import AttentionShape
from engine.attention.native_cpu import NativeCPUAttention
from engine.native import find_native
from engine.quant.affine import AffineWeight, quantize
from engine.quant.panels import packed
from engine.sampling.race import Border
from engine.sampling.rng import race_keys
from kvpool.quant import CODE_DTYPES
from tests.conformance.test_attention_backends import Case, build_inputs, filled_storage
from tests.conformance.test_quantized_kv import filled_pool
from tests.engine.test_native_decoder import PROMPT, Sequences, load
from tests.engine.test_native_elementwise import rms_norm, silu_multiply
from tests.fakes.races import RACES
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels here")

FORMS = ("float32", "bfloat16", "float16", "int8", "int8 fine", "int8 input", "int4", "int4 half")


def matrix(form: str, num_outputs: int, num_inputs: int) -> torch.Tensor | AffineWeight:
    weight = torch.randn(num_outputs, num_inputs)
    if not form.startswith("int"):
        return weight.to(getattr(torch, form))
    affine = quantize(weight, int(form[3]), torch.float16 if "half" in form else torch.float32)
    if "fine" not in form:
        return affine
    return AffineWeight(affine.bits, affine.q, affine.scales.repeat_interleave(2, 1), None)


@pytest.mark.parametrize("form", FORMS)
def test_products_and_look_ups(form: str) -> None:
    widths = (32, 64, 288) if form.startswith("int") else (1, 31, 32, 33, 288)
    for num_outputs, num_inputs in itertools.product((1, 15, 16, 17, 32, 33, 100), widths):
        stored = matrix(form, num_outputs, num_inputs)
        linear = packed(stored, torch.randn(num_outputs), input_bits=8 if "input" in form else 16)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 97):
            assert linear(torch.randn(rows, num_inputs)).isfinite().all()
        assert linear.look_up(torch.arange(num_outputs)).isfinite().all()


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16, *CODE_DTYPES.values()], ids=str)
def test_attention(pool: torch.dtype) -> None:
    for head_dim, heads, block_size in itertools.product((2, 6, 10, 64), ((1, 1), (6, 2), (70, 1)), (1, 5)):
        case = Case([(0, 1), (63, 1), (64, 1), (0, 65), (130, 7)], heads, head_dim, (None, 9))
        fill = filled_pool if pool in CODE_DTYPES.values() else filled_storage
        storage = fill(case, block_size, pool, seed=1)
        inputs = build_inputs(case.rows, block_size, storage.num_blocks, seed=2)
        attend = NativeCPUAttention(storage, AttentionShape(heads[0], 0.25, case.windows)).plan(inputs)
        dtype = pool if pool in (torch.bfloat16, torch.float16) else torch.float32
        q, k, v = (torch.randn(inputs.num_tokens, n, head_dim).to(dtype) for n in (heads[0], heads[1], heads[1]))
        for layer in range(2):
            assert attend(layer, q, k, v).isfinite().all()


def test_small_operators() -> None:
    for width in range(1, 40):
        assert rms_norm(torch.randn(2, width), torch.randn(width), 1e-5).isfinite().all()
        assert silu_multiply(torch.randn(2, 2 * width)).isfinite().all()


def test_draws() -> None:
    for rows, width in itertools.product((0, 1, 3), (1, 7, 8, 9, 31, 33, 100)):
        x, seeds = torch.randn(rows, width), np.arange(rows)
        keys, ids = race_keys(seeds, seeds, seeds), torch.arange(width).repeat(rows, 1)
        border = Border.at(x, torch.full((rows,), width - 1))
        for chosen, edge in itertools.product((None, ids), (None, border)):
            tokens, peaks = RACES["native"].winners(x, keys, ids=chosen, border=edge)
            assert (tokens < width).all()
            assert torch.equal(peaks, x.amax(1))
        counts, _ = RACES["native"].ahead(x, border)
        assert torch.equal(counts, (x > x[:, -1:]).sum(1))


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "int4_g128"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_decoder(family: str, quantization: str, tmp_path) -> None:
    sizes = {"hidden_size": 40, "intermediate_size": 52, "head_dim": 10} if quantization == "auto" else {}
    decoder = load(make_tiny_model(family, tmp_path, **sizes), quantization)
    sequences = Sequences(decoder, 3)
    for rows in ([(0, PROMPT[:33])], [(0, [5]), (1, PROMPT)], [(2, [1]), (0, [2]), (1, [3])]):
        for states in sequences.step(*rows):
            assert decoder.logits(states).isfinite().all()
