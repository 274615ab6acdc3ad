"""The vectorised sampler against its plain-Python twin, over random settings, histories, orders and batches."""

import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.batch import SlotStart
from engine.sampling import reference, truncation
from engine.sampling.params import SAMPLER_ORDER, SamplingParams
from engine.sampling.penalties import LogitBias, Penalties
from engine.sampling.rng import race_keys
from engine.sampling.sampler import Sampler
from engine.sampling.state import SlotTable
from tests.fakes.races import RACES

VOCAB = 12
CPU = torch.device("cpu")

# A grid makes ties common; thresholds off the grid keep float32 and float64 on the same side of every border.
logit = st.integers(-24, 24).map(lambda n: n / 4)
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)
shares = st.sampled_from([0.1337, 0.3119, 0.5517, 0.7793, 0.9131, 1.0])
token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, max_size=8).map(tuple)
orders = st.permutations(SAMPLER_ORDER[1:]).map(lambda rest: ("mask", *rest))


@st.composite
def sampling_params(draw_: st.DrawFn, order: st.SearchStrategy[tuple[str, ...]]) -> SamplingParams:
    return SamplingParams(
        temperature=draw_(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9])),
        top_p=draw_(shares),
        top_k=draw_(st.integers(0, VOCAB + 2)),
        min_p=draw_(st.sampled_from([0.0, 0.0512, 0.3377, 1.0])),
        typical_p=draw_(shares),
        repetition_penalty=draw_(st.sampled_from([1.0, 0.8, 1.3])),
        frequency_penalty=draw_(st.sampled_from([0.0, -0.5, 0.7])),
        presence_penalty=draw_(st.sampled_from([0.0, -0.3, 0.9])),
        seed=draw_(st.integers(-(2**63), 2**63 - 1)),
        min_tokens=draw_(st.integers(0, 6)),
        stop_token_ids=frozenset(draw_(st.lists(token, max_size=2))),
        logit_bias=MappingProxyType(draw_(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.25]), max_size=3))),
        allowed_token_ids=draw_(st.none() | st.lists(token, min_size=3, max_size=6).map(tuple)),
        bad_words_ids=draw_(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)),
        sampler_order=draw_(order),
    )


@st.composite
def slot_starts(draw_: st.DrawFn, slot: int, order: st.SearchStrategy[tuple[str, ...]]) -> SlotStart:
    params = draw_(sampling_params(order))
    return SlotStart(slot, params, draw_(st.integers(0, 3)), draw_(tokens), draw_(tokens))


def expected_token(start: SlotStart, logits: list[float]) -> int | None:
    """The twin's answer; rejects the example when the two fastest are within float32's error of each other."""
    params, output_ids = start.params, start.output_ids
    parts = (params.seed, start.choice, len(output_ids))
    first, second = race_keys(*(np.array([part], dtype=np.int64) for part in parts)).view(np.uint32)[0].tolist()
    shaped = reference.shaped(logits, params, start.prompt_ids, output_ids)
    if not params.is_greedy and sum(logit > -math.inf for logit in shaped) > 1:
        *_, runner_up, winner = sorted(reference.scores(shaped, (first, second)))
        assume(winner - runner_up > 1e-4)
    return reference.next_token(logits, params, (first, second), start.prompt_ids, output_ids)


def check(batch: list[tuple[SlotStart, list[float]]], race: str) -> None:
    sampler = Sampler(len(batch), VOCAB, CPU, race=RACES[race])
    for start, _ in batch:
        sampler.start(start)
    sampled = sampler.sample([start.slot for start, _ in batch], torch.tensor([logits for _, logits in batch]))
    for (start, logits), got in zip(batch, sampled, strict=True):
        wanted = expected_token(start, logits)
        assert (got.token_ids[0] if got.error is None else None) == wanted


@st.composite
def batches(draw_: st.DrawFn, order: st.SearchStrategy[tuple[str, ...]]) -> list[tuple[SlotStart, list[float]]]:
    num_rows = draw_(st.integers(1, 5))
    slots = draw_(st.permutations(range(num_rows)))
    return [(draw_(slot_starts(slot, order)), draw_(rows)) for slot in slots]


@given(batches(st.just(SAMPLER_ORDER)), st.sampled_from(sorted(RACES)))
@settings(deadline=None, max_examples=160)
def test_default_order_equals_the_plain_twin(batch: list[tuple[SlotStart, list[float]]], race: str) -> None:
    check(batch, race)


@given(batches(orders), st.sampled_from(sorted(RACES)))
@settings(deadline=None, max_examples=160)
def test_any_order_equals_the_plain_twin(batch: list[tuple[SlotStart, list[float]]], race: str) -> None:
    check(batch, race)


@given(batches(st.just(SAMPLER_ORDER)))
@settings(deadline=None, max_examples=100)
def test_bias_and_penalties_give_the_plain_twins_logits(batch: list[tuple[SlotStart, list[float]]]) -> None:
    table = SlotTable(len(batch), VOCAB)
    bias, penalties = LogitBias(len(batch)), Penalties(table, len(batch))
    for start, _ in batch:
        table.start(start)
        bias.start(start.slot, start.params.logit_bias)
        penalties.start(start)
    slots = np.array([start.slot for start, _ in batch])
    edited = penalties.apply(bias.apply(torch.tensor([logits for _, logits in batch]), slots), slots)
    for (start, logits), row in zip(batch, edited.tolist(), strict=True):
        unmasked = replace(
            start.params, temperature=0.0, min_tokens=0, allowed_token_ids=None, bad_words_ids=(), top_k=0
        )
        expected = reference.shaped(logits, unmasked, start.prompt_ids, start.output_ids)
        assert np.allclose(row, expected, rtol=1e-6, atol=1e-5)


@given(st.lists(rows, min_size=1, max_size=4), st.integers(1, VOCAB))
@settings(deadline=None)
def test_narrow_keeps_what_top_k_keeps_in_order_of_id(logits: list[list[float]], width: int) -> None:
    x = torch.tensor(logits)
    values, columns = truncation.narrow(x, width)
    kept = truncation.top_k(x, torch.full((len(logits),), width))
    assert torch.equal(truncation.highest_ranked(x, width).sort(-1).values, columns)
    for row in range(len(logits)):
        assert columns[row].tolist() == kept[row].isfinite().nonzero().squeeze(-1).tolist()
        assert values[row].tolist() == x[row, columns[row]].tolist()


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-200, 200, width=32)), min_size=1, max_size=700),
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from(sorted(RACES)),
)
@settings(deadline=None, max_examples=150)
def test_a_draw_never_takes_a_token_of_probability_zero(logits: list[float], word: int, race: str) -> None:
    assume(max(logits) > -math.inf)
    x = torch.tensor([logits])
    drawn, peak = RACES[race].winners(x, np.array([[word, ~word]], dtype=np.int32))
    assert peak.item() == x.max().item()
    assert x[0, drawn].item() > -math.inf
