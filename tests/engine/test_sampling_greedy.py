"""Greedy rows: the short way of those that nothing edits, against the way of all others and against torch."""

import math
from dataclasses import replace
from types import MappingProxyType

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SlotStart
from engine.sampling.params import SamplingParams
from engine.sampling.pipeline import first_highest, highest_on_device, highest_on_host
from engine.sampling.sampler import Sampler

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
NUMBERS = st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0, 1e30, -math.inf, math.inf, math.nan])


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=4))
def test_the_short_way_of_plain_greedy_rows_is_the_way_of_all_others(rows: list[list[float]]) -> None:
    """A bias of nothing sends the same rows through every step. A failed row's token means nothing."""
    edited = replace(GREEDY, logit_bias=MappingProxyType({0: 0.0}))
    outputs = []
    for params in (GREEDY, edited):
        sampler = Sampler(len(rows), 4, CPU)
        for slot in range(len(rows)):
            sampler.start(SlotStart(slot, params, 0, (0,)))
        outputs.append(sampler.sample(range(len(rows)), torch.tensor(rows)))
    assert outputs[0] == outputs[1]


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_highest_logit_is_the_one_that_torch_finds(rows: list[list[float]]) -> None:
    peaks, columns = first_highest(torch.tensor(rows))
    expected = torch.tensor(rows).max(-1)
    assert columns.tolist() == expected.indices.tolist()
    assert torch.equal(peaks.nan_to_num(nan=7.0), expected.values.nan_to_num(nan=7.0))


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_host_and_device_choose_alike(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    assert torch.equal(highest_on_host(logits), highest_on_device(logits))
