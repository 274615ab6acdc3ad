"""The sampler as the engine uses it: distributions, seeds, batches, preemption, orders and failing rows."""

import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine.batch import SlotStart
from engine.sampling.params import SAMPLER_ORDER, SamplingParams
from engine.sampling.sampler import Sampler

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def draws(params: SamplingParams, logits: list[float], count: int) -> np.ndarray:
    """How often each token is the first one drawn, over `count` seeds."""
    sampler = Sampler(count, len(logits), CPU)
    for seed in range(count):
        sampler.start(SlotStart(seed, replace(params, seed=seed), 0, (0,)))
    sampled = sampler.sample(range(count), torch.tensor([logits]).repeat(count, 1))
    return np.bincount([entry.token_ids[0] for entry in sampled], minlength=len(logits))


def one(params: SamplingParams, logits: list[float], prompt: tuple[int, ...] = (0,), out: tuple[int, ...] = ()) -> int:
    """The token drawn after `prompt` and `out`."""
    sampler = Sampler(1, len(logits), CPU)
    sampler.start(SlotStart(0, params, 0, prompt, out))
    (sampled,) = sampler.sample([0], torch.tensor([logits]))
    assert sampled.error is None
    return sampled.token_ids[0]


LOGITS = [0.0, 2.0, 1.0, -1.0, 1.5, -3.0]
PLAIN = torch.softmax(torch.tensor(LOGITS), dim=-1).tolist()


def only(kept: list[int], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) if i in kept else 0.0 for i, logit in enumerate(LOGITS)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), PLAIN),
        (SamplingParams(temperature=0.5), only([0, 1, 2, 3, 4, 5], 0.5)),
        (SamplingParams(temperature=2.0), only([0, 1, 2, 3, 4, 5], 2.0)),
        (SamplingParams(top_k=3), only([1, 2, 4])),
        (SamplingParams(top_p=0.7), only([1, 4])),
        (SamplingParams(min_p=0.2), only([1, 2, 4])),
        (SamplingParams(temperature=2.0, top_k=4, top_p=0.9, min_p=0.4), only([1, 2, 4], 2.0)),
        (SamplingParams(allowed_token_ids=(0, 5)), only([0, 5])),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params: SamplingParams, expected: list[float]) -> None:
    """Chi-square over 10,000 fixed seeds; 5 degrees of freedom stay below 25 (p = 1.4e-4)."""
    counts = draws(params, LOGITS, 10_000)
    wanted = np.array(expected) * 10_000
    assert counts[wanted == 0.0].sum() == 0
    possible = wanted > 0.0
    assert ((counts[possible] - wanted[possible]) ** 2 / wanted[possible]).sum() < 25.0


def test_greedy_takes_the_first_of_the_highest() -> None:
    assert one(GREEDY, [1.0, 3.0, 3.0, 2.0]) == 1


def run(params: SamplingParams, choice: int = 0, steps: int = 24) -> list[int]:
    sampler = Sampler(1, 50, CPU)
    sampler.start(SlotStart(0, params, choice, (1, 2)))
    return [sampler.sample([0], step_logits(step)[None])[0].token_ids[0] for step in range(steps)]


def step_logits(step: int, vocab: int = 50) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(step)) * 1.5


def test_seed_and_choice_decide_the_draws() -> None:
    first = run(SamplingParams(seed=5))
    assert run(SamplingParams(seed=5)) == first
    assert run(SamplingParams(seed=6)) != first
    assert run(SamplingParams(seed=5), choice=1) != first
    assert run(SamplingParams(seed=5), choice=1) == run(SamplingParams(seed=5), choice=1)


def test_equal_logits_at_successive_positions_are_drawn_afresh() -> None:
    sampler = Sampler(1, 1000, CPU)
    sampler.start(SlotStart(0, SamplingParams(seed=1), 0, (0,)))
    drawn = {sampler.sample([0], torch.zeros(1, 1000))[0].token_ids[0] for _ in range(50)}
    assert len(drawn) > 40


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.5, top_p=0.95),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(temperature=1.5, min_p=0.02),
        SamplingParams(typical_p=0.9),
    ],
)
def test_a_seeds_text_survives_noise_in_the_logits(params: SamplingParams) -> None:
    """200 tokens from 8,000, as another batch shape would compute them: off by some 1e-6 each."""
    texts = []
    for noise in (0.0, 1e-6):
        sampler = Sampler(1, 8_000, CPU)
        sampler.start(SlotStart(0, replace(params, seed=21), 0, (1, 2)))
        rows = (step_logits(step, 8_000) + step_logits(step + 1_000, 8_000) * noise for step in range(200))
        texts.append([sampler.sample([0], row[None])[0].token_ids[0] for row in rows])
    assert texts[0] == texts[1]


def test_at_temperature_zero_seed_and_choice_do_not_matter() -> None:
    assert run(replace(GREEDY, seed=1), choice=0) == run(replace(GREEDY, seed=2), choice=3)


EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=30,
    min_p=0.01,
    typical_p=0.98,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    seed=11,
    min_tokens=10,
    stop_token_ids=frozenset((3, 4)),
    logit_bias=MappingProxyType({7: 2.0, 8: -3.0}),
    bad_words_ids=((5,), (6, 7), (9, 9, 1)),
    logprobs=2,
)

VARIETY = [
    EVERYTHING,
    SamplingParams(seed=3),
    GREEDY,
    SamplingParams(seed=4, top_p=0.8),
    SamplingParams(seed=5, top_k=7, temperature=1.4),
    SamplingParams(seed=6, min_p=0.1),
    SamplingParams(seed=7, typical_p=0.6),
    replace(GREEDY, frequency_penalty=1.5, logprobs=3),
    SamplingParams(seed=8, allowed_token_ids=tuple(range(0, 50, 3)), logprob_token_ids=(4, 5)),
    replace(EVERYTHING, sampler_order=("mask", *reversed(SAMPLER_ORDER[1:]))),
]


@pytest.mark.parametrize("number", range(len(VARIETY)))
def test_same_tokens_alone_and_among_strangers_that_come_and_go(number: int) -> None:
    """The row moves to another place of the batch every step, and its neighbours change."""
    alone = run(VARIETY[number])
    sampler = Sampler(16, 50, CPU)
    sampler.start(SlotStart(9, VARIETY[number], 0, (1, 2)))
    shuffle = np.random.default_rng(number)
    together = []
    for step in range(24):
        guests = shuffle.permutation(9)[: shuffle.integers(0, 9)].tolist()
        for slot in guests:
            sampler.start(SlotStart(slot, VARIETY[shuffle.integers(len(VARIETY))], slot, (slot, 1), (4,) * slot))
        slots = shuffle.permutation([9, *guests]).tolist()
        rows = [step_logits(step) if slot == 9 else step_logits(1000 + slot) for slot in slots]
        together.append(sampler.sample(slots, torch.stack(rows))[slots.index(9)].token_ids[0])
    assert together == alone


@pytest.mark.parametrize("number", range(len(VARIETY)))
def test_a_preempted_sequence_continues_as_if_nothing_had_happened(number: int) -> None:
    straight = run(VARIETY[number])
    sampler = Sampler(2, 50, CPU)
    sampler.start(SlotStart(0, VARIETY[number], 0, (1, 2)))
    tokens: list[int] = []
    slot = 0
    for step in range(24):
        if step % 5 == 4:  # preempted: back in the other slot, with the tokens it has
            slot = 1 - slot
            sampler.start(SlotStart(slot, VARIETY[number], 0, (1, 2), tuple(tokens)))
        tokens.append(sampler.sample([slot], step_logits(step)[None])[0].token_ids[0])
    assert tokens == straight


def test_a_slot_forgets_the_sequence_before() -> None:
    sampler = Sampler(1, 50, CPU)
    sampler.start(SlotStart(0, EVERYTHING, 0, (1, 2), (3, 4, 5)))
    sampler.sample([0], step_logits(0)[None])
    sampler.start(SlotStart(0, SamplingParams(seed=5), 0, (1, 2)))
    assert [sampler.sample([0], step_logits(step)[None])[0].token_ids[0] for step in range(24)] == run(
        SamplingParams(seed=5)
    )


def test_the_order_of_steps_matters_and_can_be_chosen() -> None:
    """Top-k before the bias keeps the two highest raw logits; after it, the biased token is one of them."""
    params = SamplingParams(top_k=2, logit_bias=MappingProxyType({0: 50.0}))
    logits = [0.0, 3.0, 2.0]
    assert one(params, logits) == 0
    early = ("mask", "top_k", "logit_bias", "penalties", "temperature", "typical_p", "top_p", "min_p")
    assert one(replace(params, sampler_order=early), logits) in (1, 2)


def test_temperature_before_penalties_scales_the_logits_only() -> None:
    """At temperature 0.1 a presence penalty of 2 tips a lead of 1 before the division, but not after it."""
    params = SamplingParams(temperature=0.1, presence_penalty=2.0)
    logits = [1.0, 0.0]
    sampled = [one(replace(params, seed=seed), logits, out=(0,)) for seed in range(20)]
    assert sampled == [1] * 20
    late = ("mask", "logit_bias", "temperature", "penalties", "typical_p", "top_k", "top_p", "min_p")
    sampled = [one(replace(params, seed=seed, sampler_order=late), logits, out=(0,)) for seed in range(20)]
    assert sampled == [0] * 20


def test_greedy_follows_the_order_of_its_edits() -> None:
    """Bias then penalty: (1 + 3) / 2 = 2; penalty then bias: 1 / 2 + 3 = 3.5; the rival has 3."""
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias=MappingProxyType({0: 3.0}))
    assert one(params, [1.0, 3.0], out=(0,)) == 1
    swapped = ("mask", "penalties", "logit_bias", *SAMPLER_ORDER[3:])
    assert one(replace(params, sampler_order=swapped), [1.0, 3.0], out=(0,)) == 0


def penalised(params: SamplingParams, prompt: tuple[int, ...], out: tuple[int, ...], logits: list[float]) -> int:
    return one(replace(params, temperature=0.0), logits, prompt, out)


def test_frequency_counts_presence_does_not() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    assert penalised(params, (0, 0, 0), (1, 1), [0.0, 2.5, 1.0]) == 2  # 2.5 - 2
    assert penalised(params, (0, 0, 0), (1,), [0.0, 2.5, 1.0]) == 1  # 2.5 - 1
    params = SamplingParams(presence_penalty=1.0)
    assert penalised(params, (0,), (1, 1), [0.0, 2.5, 1.0]) == 1  # 2.5 - 1
    assert penalised(params, (1,), (), [0.0, 1.1, 1.0]) == 1  # the prompt does not count


def test_negative_penalties_encourage() -> None:
    assert penalised(SamplingParams(presence_penalty=-1.0), (0,), (2,), [0.0, 0.5, 0.0]) == 2


@pytest.mark.parametrize("repetition", [0.7, 1.5])
def test_repetition_penalty_equals_transformers(repetition: float) -> None:
    """Over prompt and output, for logits of both signs; every token is seen by excluding those above it."""
    logits = step_logits(3, 20)
    prompt, out = (3, 5, 5, 9), (1, 9, 12)
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([[*prompt, *out]]), logits[None])[0]
    banned: tuple[tuple[int, ...], ...] = ()
    for token_id in expected.argsort(descending=True).tolist():
        params = replace(GREEDY, repetition_penalty=repetition, bad_words_ids=banned)
        assert one(params, logits.tolist(), prompt, out) == token_id
        if len(banned) < 19:
            banned = (*banned, (token_id,))


def test_penalties_advance_with_the_drawn_tokens() -> None:
    """A frequency penalty of 1 over leads of 0.5: the tokens take turns."""
    sampler = Sampler(1, 3, CPU)
    sampler.start(SlotStart(0, replace(GREEDY, frequency_penalty=1.0), 0, (0,)))
    logits = torch.tensor([[1.0, 0.5, -9.0]])
    assert [sampler.sample([0], logits.clone())[0].token_ids[0] for _ in range(4)] == [0, 1, 0, 1]


def test_more_different_tokens_than_the_counts_first_had_room_for() -> None:
    """With a huge frequency penalty every token comes once before any comes twice."""
    sampler = Sampler(1, 300, CPU)
    sampler.start(SlotStart(0, replace(GREEDY, frequency_penalty=2.0, repetition_penalty=1.1), 0, ()))
    tokens = [sampler.sample([0], torch.zeros(1, 300))[0].token_ids[0] for _ in range(600)]
    assert tokens[:300] == list(range(300))
    assert sorted(tokens[300:]) == list(range(300))


def test_logit_bias_bans_and_forces() -> None:
    assert (draws(SamplingParams(logit_bias=MappingProxyType({1: -100.0})), LOGITS, 500)[1]) == 0
    assert (draws(SamplingParams(logit_bias=MappingProxyType({5: 100.0})), LOGITS, 500)[5]) == 500


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2)])
def test_broken_logits_fail_their_own_row_only(broken: float, params: SamplingParams) -> None:
    sampler = Sampler(3, 100, CPU)
    for slot in range(3):
        sampler.start(SlotStart(slot, replace(params, logprobs=1), 0, (0,)))
    logits = torch.zeros(3, 100)
    logits[:, 7] = 50.0
    logits[1, 3] = broken
    first, second, third = sampler.sample([0, 1, 2], logits)
    assert second.error is not None
    assert "finite" in second.error
    assert not second.logprobs
    assert (first.token_ids[0], first.error, third.token_ids[0], third.error) == (7, None, 7, None)
    assert third.logprobs


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2)])
def test_a_row_without_any_token_fails_alone(params: SamplingParams) -> None:
    sampler = Sampler(2, 100, CPU)
    impossible = replace(params, seed=1, allowed_token_ids=(1, 2), bad_words_ids=((1,), (2,)))
    sampler.start(SlotStart(0, impossible, 0, (0,)))
    sampler.start(SlotStart(1, replace(params, seed=2), 0, (0,)))
    logits = step_logits(1, 100).repeat(2, 1)
    failed, fine = sampler.sample([0, 1], logits)
    assert failed.error is not None
    assert "no token is left" in failed.error
    assert fine.error is None


def test_tokens_the_model_itself_excludes_are_no_error() -> None:
    assert one(SamplingParams(), [-math.inf, -math.inf, 0.0, -math.inf]) == 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-20, 1e-5, 1e-2])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    for order in (SAMPLER_ORDER, ("mask", "temperature", *(s for s in SAMPLER_ORDER[1:] if s != "temperature"))):
        params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.1, sampler_order=order)
        assert one(params, [-1e4, 1e4, 1e4 - 8, -30.0]) == 1


def test_huge_spans_of_logits_draw_the_only_possible_token() -> None:
    assert one(SamplingParams(temperature=2.0), [-6e4, 6.5e4, 0.0]) == 1
    assert draws(SamplingParams(), [-120.0, 0.0, -110.0], 1000).tolist() == [0, 1000, 0]


def test_half_precision_logits_are_taken() -> None:
    sampler = Sampler(1, 4, CPU)
    sampler.start(SlotStart(0, replace(GREEDY, logprobs=0), 0, (0,)))
    (sampled,) = sampler.sample([0], torch.tensor([[0.0, 6e4, -6e4, 1.0]], dtype=torch.float16))
    assert sampled.token_ids[0] == 1
    assert sampled.logprobs
    assert sampled.logprobs[0].logprob == 0.0


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias=MappingProxyType({10: 1.0}))),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(1, 10))),
        ("bad_words", SamplingParams(bad_words_ids=((1, 10),))),
        ("logprob_token_ids", SamplingParams(logprob_token_ids=(-1,))),
    ],
)
def test_ids_outside_the_vocabulary_are_named(field: str, params: SamplingParams) -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.start(SlotStart(0, GREEDY, 0, (0,)))
    with pytest.raises(ValueError, match=rf"token id (10|-1) in {field}"):
        sampler.start(SlotStart(0, params, 0, (0,)))
    assert sampler.sample([0], torch.eye(10)[3:4])[0].token_ids[0] == 3  # the slot is as it was


def test_prompt_and_output_ids_outside_the_vocabulary_are_named() -> None:
    sampler = Sampler(1, 10, CPU)
    with pytest.raises(ValueError, match="token id 12 in the prompt"):
        sampler.start(SlotStart(0, GREEDY, 0, (1, 12)))
    with pytest.raises(ValueError, match="token id 11 in the output"):
        sampler.start(SlotStart(0, GREEDY, 0, (1,), (2, 11)))


def test_a_slot_whose_only_start_was_refused_does_not_harm_the_step() -> None:
    sampler = Sampler(2, 10, CPU)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.start(SlotStart(0, GREEDY, 0, (10,)))
    sampler.begin([0])
    assert sampler.sample([0], torch.eye(10)[3:4])[0].error is None


def test_logits_made_under_inference_mode_can_be_edited() -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.start(SlotStart(0, replace(GREEDY, bad_words_ids=((3,),)), 0, (1,)))
    with torch.inference_mode():
        logits = torch.eye(10)[3:4].clone()
    assert sampler.sample([0], logits)[0].token_ids[0] == 0


def test_an_empty_step_gives_nothing() -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.begin([])
    assert sampler.sample([], torch.empty(0, 10)) == []
