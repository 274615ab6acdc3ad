"""Reported log-probabilities: of the raw distribution, aligned, ordered and finite."""

import math
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from engine.batch import SlotStart, TokenLogprob
from engine.sampling.logprobs import LOGPROB_FLOOR, describe, prompt_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler

CPU = torch.device("cpu")


def random_logits(num_rows: int, vocab: int = 200) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(4)) * 3


def described(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int], extra: list[tuple[int, ...]]
) -> list[TokenLogprob]:
    rows = describe(logits, token_ids, num_top, extra)
    return rows.read(rows.numbers)


def check(entry: TokenLogprob, logits: torch.Tensor, num_top: int, extra: tuple[int, ...] = ()) -> None:
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[entry.token_id]).sum())
    ranked = sorted(range(len(expected)), key=lambda token_id: (-logits[token_id].item(), token_id))
    assert entry.top_ids == (*ranked[:num_top], *extra)
    assert entry.top_logprobs == pytest.approx([expected[i].item() for i in entry.top_ids], abs=1e-5)


def test_equal_to_log_softmax_with_each_row_its_own_wishes() -> None:
    logits = random_logits(4)
    token_ids = torch.tensor([0, 5, 199, int(logits[3].argmax())])
    num_top, extra = [0, 3, 20, 1], [(), (7, 7, 5), (0,), (1, 2)]
    entries = described(logits, token_ids, num_top, extra)
    assert [entry.token_id for entry in entries] == token_ids.tolist()
    for row, entry in enumerate(entries):
        check(entry, logits[row], num_top[row], extra[row])
    assert entries[3].rank == 1


def test_ties_list_the_lower_id_first_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    (entry,) = described(logits, torch.tensor([3]), [2], [()])
    assert entry.top_ids == (1, 2)
    assert entry.rank == 1


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    (entry,) = described(random_logits(1, 5), torch.tensor([2]), [20], [()])
    assert sorted(entry.top_ids) == [0, 1, 2, 3, 4]


def test_impossible_tokens_have_the_floor() -> None:
    logits = torch.tensor([[0.0, -math.inf, -5e4, 0.0]])
    (entry,) = described(logits, torch.tensor([1]), [4], [()])
    assert entry.logprob == LOGPROB_FLOOR
    assert entry.top_logprobs == pytest.approx((-math.log(2), -math.log(2), LOGPROB_FLOOR, LOGPROB_FLOOR))


def sampled_logprob(params: SamplingParams, logits: torch.Tensor) -> TokenLogprob | None:
    sampler = Sampler(1, logits.shape[-1], CPU)
    sampler.start(SlotStart(0, params, 0, (0,)))
    (sampled,) = sampler.sample([0], logits.clone())
    assert [entry.token_id for entry in sampled.logprobs] == list(sampled.token_ids) * len(sampled.logprobs)
    return sampled.logprobs[0] if sampled.logprobs else None


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.7])
def test_sampling_edits_do_not_change_the_reported_distribution(temperature: float) -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    params = SamplingParams(
        temperature=temperature,
        top_k=5,
        top_p=0.5,
        presence_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias=MappingProxyType({best: -100.0}),
        bad_words_ids=((1,),),
        logprobs=4,
    )
    entry = sampled_logprob(params, logits)
    assert entry is not None
    assert entry.token_id != best
    check(entry, logits[0], 4)
    assert entry.top_ids[0] == best


def test_only_who_asks_gets_any() -> None:
    logits = random_logits(1)
    assert sampled_logprob(SamplingParams(), logits) is None
    entry = sampled_logprob(SamplingParams(logprobs=0), logits)
    assert entry is not None
    assert entry.top_ids == ()
    entry = sampled_logprob(SamplingParams(logprob_token_ids=(9, 3)), logits)
    assert entry is not None
    check(entry, logits[0], 0, (9, 3))


def test_rows_that_ask_and_rows_that_do_not_share_a_batch() -> None:
    logits = random_logits(5)
    sampler = Sampler(5, 200, CPU)
    asked = [None, 2, None, 0, 7]
    for slot, logprobs in enumerate(asked):
        sampler.start(SlotStart(slot, SamplingParams(seed=slot, logprobs=logprobs, temperature=slot % 2), 0, (0,)))
    slots = [3, 0, 4, 2, 1]
    sampled = sampler.sample(slots, logits[slots].clone())
    for slot, entry in zip(slots, sampled, strict=True):
        wanted = asked[slot]
        assert len(entry.logprobs) == (wanted is not None)
        if wanted is not None:
            assert entry.logprobs[0].token_id == entry.token_ids[0]
            check(entry.logprobs[0], logits[slot], wanted)


@pytest.mark.parametrize("num_rows", [0, 1, 64, 150])
def test_prompt_logprobs_score_each_next_token(num_rows: int) -> None:
    logits = random_logits(num_rows)
    before = logits.clone()
    targets = torch.arange(num_rows) % 200
    entries = prompt_logprobs(logits, targets, 2)
    assert [entry.token_id for entry in entries] == targets.tolist()
    for row, entry in enumerate(entries):
        check(entry, logits[row], 2)
    assert torch.equal(logits, before)


def test_a_large_vocabulary_keeps_ids_exact() -> None:
    logits = torch.zeros(1, 262_144)
    logits[0, [262_143, 200_001]] = torch.tensor([3.0, 2.0])
    (entry,) = described(logits, torch.tensor([262_142]), [2], [()])
    assert (entry.token_id, entry.top_ids, entry.rank) == (262_142, (262_143, 200_001), 3)


def test_a_row_that_failed_has_none() -> None:
    params = SamplingParams(logprobs=1, allowed_token_ids=(3,), bad_words_ids=((3,),))
    assert sampled_logprob(replace(params, temperature=0.0), random_logits(1)) is None
