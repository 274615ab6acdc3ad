"""The arithmetic of bounds: the two limits of a decode step, prefill, and a whole round of requests."""

import pytest

from bench.bounds import Bounds, ModelCost, decode_step_s, mean_of, prefill_s, round_s

BOUNDS = Bounds(read_bytes_per_s=1000.0, gemm_per_s={"float32": 400.0, "bfloat16": 800.0, "int8": 9000.0})
COST = ModelCost(weight_bytes=500, kv_bytes_per_token=2, num_layer_params=10, num_head_params=5, dtype="float32")


def test_few_sequences_are_bound_by_what_must_be_read():
    assert decode_step_s(COST, BOUNDS, num_seqs=1, context=100) == pytest.approx((500 + 200) / 1000)
    assert decode_step_s(COST, BOUNDS, num_seqs=3, context=100) == pytest.approx((500 + 600) / 1000)


def test_many_sequences_are_bound_by_arithmetic():
    assert decode_step_s(COST, BOUNDS, num_seqs=1000, context=0) == pytest.approx(2 * 15 * 1000 / 400)


def test_prefill_leaves_the_head_out():
    assert prefill_s(COST, BOUNDS, 40) == pytest.approx(2 * 10 * 40 / 400)


def test_a_round_is_its_prefill_and_the_decode_steps_after_the_first_token():
    steps = sum(decode_step_s(COST, BOUNDS, 2, 8 + done) for done in (1, 2, 3))
    assert round_s(COST, BOUNDS, 2, (8, 4)) == pytest.approx(prefill_s(COST, BOUNDS, 16) + steps)


def test_the_gemm_is_that_of_the_dtype_or_the_best_floating_point_one():
    assert BOUNDS.gemm("float32") == 400.0
    assert Bounds(1000.0, {"float32": 400.0, "bfloat16": 60.0}).gemm("bfloat16") == 400.0
    assert BOUNDS.gemm(None) == 800.0
    assert BOUNDS.gemm("float16") == 800.0


def test_bounds_around_a_run_are_averaged():
    other = Bounds(3000.0, {"float32": 200.0, "bfloat16": 800.0, "int8": 1000.0})
    assert mean_of(BOUNDS, other) == Bounds(2000.0, {"float32": 300.0, "bfloat16": 800.0, "int8": 5000.0})
