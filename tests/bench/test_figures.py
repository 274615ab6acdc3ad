"""The arithmetic of figures, on requests made by hand and on random ones."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Record, Run, Slo, Spread, figures_of, knee, median_of, percentile, spread

GOOD = Record(due_s=10.0, first_s=10.5, gaps_s=(0.1, 0.3), ended_s=11.0, num_prompt_tokens=7, num_output_tokens=3)


def test_a_request_has_its_times_from_the_moment_it_was_due():
    assert GOOD.ttft_s == pytest.approx(0.5)
    assert GOOD.tpot_s == pytest.approx(0.25)
    assert GOOD.end_to_end_s == pytest.approx(1.0)


def test_what_cannot_be_told_is_nan():
    assert math.isnan(Record(0.0, 1.0).ttft_s)
    assert math.isnan(Record(0.0, 1.0, first_s=0.5, num_output_tokens=1).tpot_s)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.25, 0.5, 0.95, 0.99, 1.0]),
)
def test_percentiles_are_numpys(values, share):
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)), rel=1e-9, abs=1e-6)


def test_a_spread_leaves_out_what_is_not_known():
    assert spread([1.0, math.nan, 3.0]).p50 == 2.0
    assert math.isnan(spread([math.nan]).p99)


def test_a_run_counts_wall_time_from_first_due_to_last_end():
    run = Run((GOOD, Record(9.0, 12.0, first_s=9.5, num_output_tokens=5)), generator_cpu_s=0.3)
    figures = figures_of(run, Slo())
    assert figures.wall_s == 3.0
    assert figures.output_tokens_per_s == pytest.approx(8 / 3)
    assert figures.requests_per_s == pytest.approx(2 / 3)
    assert figures.generator_cpu_share == pytest.approx(0.1)
    assert figures.itl.p50 == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("slo", "num_meeting"),
    [(Slo(1.0, 1.0), 1), (Slo(0.4, 1.0), 0), (Slo(1.0, 0.2), 0), (Slo(0.5, 0.25), 1)],
)
def test_goodput_asks_for_both_objectives(slo, num_meeting):
    run = Run((GOOD, Record(10.0, 12.0, error="status 500")))
    figures = figures_of(run, slo)
    assert figures.num_failed == 1
    assert figures.goodput_share == num_meeting / 2
    assert figures.goodput_per_s == num_meeting / 2.0
    assert figures.num_output_tokens == 3


def test_a_single_token_has_no_tpot_to_miss():
    assert Slo(1.0, 0.001).holds(Record(0.0, 9.0, first_s=0.5, num_output_tokens=1))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_medians_are_taken_figure_by_figure(walls):
    repeats = [figures_of(Run((GOOD,), given_wall_s=wall), Slo()) for wall in walls]
    median = median_of(repeats)
    assert median.wall_s == statistics.median(walls)
    assert median.output_tokens_per_s == pytest.approx(statistics.median(3 / wall for wall in walls))
    assert median.ttft == Spread(GOOD.ttft_s, GOOD.ttft_s, GOOD.ttft_s)


def test_the_knee_is_the_fewest_users_with_nearly_all_throughput():
    assert knee([(1, 10.0), (2, 19.0), (4, 33.0), (8, 40.0), (16, 41.0)]) == 4
    assert knee([(1, 40.0), (8, 41.0)]) == 1
