"""Rows that only go on: the short ways in which they are planned and committed, against the ways of all rows."""

import random
from typing import Any

import pytest

from scheduler import commit, planner
from scheduler.request import Request
from tests.scheduler.harness import Answer, House, house, request


def requests(seed: int) -> list[Request]:
    """Some of everything: lengths, choices, stop tokens, logprobs, prompts that begin alike or are to be scored."""
    rng = random.Random(seed)
    return [
        request(
            range(1, rng.randint(2, 14)),
            rng.randint(0, 14),
            seed=number % 2,
            num_choices=rng.choice([1, 1, 3]),
            stop_token_ids=frozenset(rng.sample(range(97), 8)),
            min_tokens=rng.choice([0, 3]),
            logprobs=rng.choice([None, 1]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        for number in range(8)
    ]


async def told(all_requests: list[Request], **settings: Any) -> tuple[House, list[list[Answer]]]:
    async with house(max_num_batched_tokens=12, num_blocks=24, **settings) as h:
        return h, await h.answers(all_requests)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("seed", range(3))
async def test_rows_that_go_on_come_to_what_they_come_to_like_all_others(
    seed: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"engine": {"num_drafts": num_drafts}, "max_num_seqs": 5}
    short, short_answers = await told(requests(seed), **settings)
    monkeypatch.setattr(commit, "goes_on", lambda *_: False)
    monkeypatch.setattr(planner, "all_go_on", lambda *_: False)
    long, long_answers = await told(requests(seed), **settings)
    assert short_answers == long_answers
    assert short.engine.batches == long.engine.batches
    assert short.watcher.gaps == long.watcher.gaps
    assert short.watcher.ttfts == long.watcher.ttfts
    assert [end.num_output_tokens for end in short.watcher.ends] == [end.num_output_tokens for end in long.watcher.ends]


async def test_most_rows_of_an_answer_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[bool] = []
    goes_on = commit.goes_on
    monkeypatch.setattr(commit, "goes_on", lambda *row: verdicts.append(goes_on(*row)) or verdicts[-1])
    await told([request(6, 12)])
    assert verdicts == [False, *[True] * 10, False]
