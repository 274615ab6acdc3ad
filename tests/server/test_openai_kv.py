"""`cache_explain` and `GET /v1/kv` over HTTP."""

import asyncio
from typing import Any

import pytest

from server.limits import KeyRing
from tests.server.conftest import Bench, running

FIRST = "You are a helpful assistant. Answer the question: where does the Danube begin, and where does it end?"
SECOND = "You are a helpful assistant. Answer the question: where does the Rhine begin, and where does it end? "


async def explained(bench: Bench, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = await bench.complete(prompt, max_tokens=1, cache_explain=True, **fields)
    assert answer.status_code == 200, answer.text
    [explanation] = answer.json()["cache_explain"]
    return explanation


async def test_the_first_difference_with_the_text_around_it(bench: Bench) -> None:
    assert (await explained(bench, FIRST))["reason"] == "never_seen"
    got = await explained(bench, SECOND)
    position = SECOND.index("Rhine")  # one token is one byte here
    assert got == {
        "prompt_tokens": len(SECOND),
        "cached_tokens": position // 16 * 16,
        "matched_blocks": position // 16,
        "block_size": 16,
        "reason": "never_seen",
        "first_difference": {
            "position": position,
            "before": SECOND[position - 16 : position],
            "after": SECOND[position : position + 16],
        },
    }


async def test_a_full_match_and_a_short_prompt(bench: Bench) -> None:
    await explained(bench, FIRST)
    got = await explained(bench, FIRST)
    assert (got["reason"], got["first_difference"]) == (None, None)
    assert got["matched_blocks"] == len(FIRST) // 16
    assert (await explained(bench, "short"))["reason"] == "too_short"


async def test_salts_are_told_apart(bench: Bench) -> None:
    await explained(bench, FIRST)
    assert (await explained(bench, FIRST, cache_salt="mine"))["reason"] == "salt"
    assert (await explained(bench, FIRST, cache_salt="mine"))["reason"] is None


async def test_a_scored_prompt_is_not_looked_up(bench: Bench) -> None:
    assert (await explained(bench, FIRST, prompt_logprobs=0))["reason"] == "not_asked"


async def test_one_explanation_for_each_prompt(bench: Bench) -> None:
    await explained(bench, FIRST)
    answer = await bench.complete([FIRST, "short"], max_tokens=1, cache_explain=True)
    assert [entry["reason"] for entry in answer.json()["cache_explain"]] == [None, "too_short"]


async def test_chat_streams_it_in_the_last_chunk(bench: Bench) -> None:
    body = {"messages": [{"role": "user", "content": FIRST}], "max_tokens": 1, "cache_explain": True}
    events = await bench.events("/v1/chat/completions", body)
    told = [event for event in events[:-1] if "cache_explain" in event]
    assert told == [events[-2]]
    assert told[0]["choices"] == []
    assert "usage" not in told[0]
    assert told[0]["cache_explain"][0]["reason"] == "never_seen"
    with_usage = await bench.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert with_usage[-2]["cache_explain"][0]["reason"] is None
    assert with_usage[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("fields", [{}, {"cache_explain": False}, {"cache_explain": None}], ids=str)
async def test_nothing_is_told_unasked(bench: Bench, fields: dict[str, Any]) -> None:
    assert "cache_explain" not in (await bench.complete(FIRST, max_tokens=1, **fields)).json()
    assert len(await bench.events("/v1/completions", {"prompt": FIRST, "max_tokens": 1, **fields})) <= 3


async def test_keys_that_share_a_server_learn_nothing_of_each_other() -> None:
    """Of one's own salt everything; of what all share no more than whole blocks; of other salts nothing."""
    keys = ("one", "two")
    async with running(api_key=keys, keys=KeyRing.load(keys, None)) as bench:
        headers = {"Authorization": "Bearer one"}

        async def ask(prompt: str, **fields: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 1, "cache_explain": True, **fields}
            answer = await bench.client.post("/v1/completions", json=body, headers=headers)
            return answer.json()["cache_explain"][0]

        await ask(FIRST, cache_salt="mine")
        assert (await ask(FIRST))["reason"] == "never_seen"
        position = SECOND.index("Rhine")
        assert (await ask(SECOND))["first_difference"]["position"] == position // 16 * 16
        assert (await ask(SECOND, cache_salt="mine"))["first_difference"]["position"] == position


async def test_the_pool_for_operators(bench: Bench) -> None:
    for _ in range(3):
        await bench.complete(FIRST, max_tokens=1)
    answer = await bench.client.get("/v1/kv")
    assert answer.status_code == 200
    got = answer.json()
    num_blocks = len(FIRST) // 16
    block_bytes = 16 * 2 * 2 * 1 * 8 * 4  # tokens x (K and V) x layers x heads x head_dim x float32
    assert got["blocks"] == {"total": 256, "referenced": 0, "cached": num_blocks, "free": 256 - num_blocks, "pinned": 0}
    assert got["bytes_per_block"] == block_bytes
    assert got["fragmentation"] == {"unused_tokens": 0, "bytes": 0, "percent": 0.0}
    assert got["prefix_cache"]["hit_tokens"] == 2 * 16 * num_blocks
    assert got["prefix_cache"]["hit_rate"] == pytest.approx(2 * 16 * num_blocks / (3 * len(FIRST)))
    assert got["block_age_s"]["count"] == num_blocks
    assert 0 <= got["block_age_s"]["newest"] <= got["block_age_s"]["oldest"] < 60
    [prefix] = got["top_prefixes"]
    assert (prefix["blocks"], prefix["tokens"], prefix["hits"], prefix["holders"]) == (
        num_blocks,
        16 * num_blocks,
        2,
        0,
    )
    assert prefix["bytes"] == num_blocks * block_bytes
    assert len(prefix["hash"]) == 16
    assert FIRST[:16] not in answer.text


async def test_a_prompt_with_a_cache_key_survives_pressure() -> None:
    """The pool holds 4,096 tokens; eight long prompts go through it, and only what is pinned is found afterwards."""
    async with running(prefix_pin_budget=0.25, scheduler={"prefix_pin_share": 0.25}) as bench:
        pinned, other = "a" + "x" * 319, "b" + "x" * 319
        for _ in range(2):  # the second time it is found, and pinned as it enters
            await bench.complete(pinned, max_tokens=1, prompt_cache_key="mine")
            await bench.complete(other, max_tokens=1)
        assert (await bench.client.get("/v1/kv")).json()["blocks"]["pinned"] == 20
        for number in range(8):
            await bench.complete(chr(ord("c") + number) + "y" * 899, max_tokens=1)
        assert (await bench.client.get("/v1/kv")).json()["prefix_cache"]["evicted_blocks"] > 200
        found = [await explained(bench, prompt) for prompt in (pinned, other)]
        assert [(each["cached_tokens"], each["reason"]) for each in found] == [(319, None), (0, "evicted")]


async def test_while_something_runs() -> None:
    gate = asyncio.Event()
    async with running(engine={"gate": gate}) as bench:
        task = asyncio.create_task(bench.complete("x" * 20, max_tokens=5))
        await bench.steps(1)
        got = (await bench.client.get("/v1/kv")).json()
        assert got["blocks"]["referenced"] == 2
        assert got["occupancy"] == 2 / 256
        assert got["fragmentation"]["unused_tokens"] == 12
        assert got["fragmentation"]["percent"] == pytest.approx(100 * 12 / 32)
        gate.set()
        assert (await task).status_code == 200


@pytest.mark.parametrize("top", ["-1", "101", "many"])
async def test_how_many_prefixes_is_bounded(bench: Bench, top: str) -> None:
    answer = await bench.client.get("/v1/kv", params={"top": top})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top"


async def test_a_key_is_asked_for() -> None:
    async with running(api_key=("one",), keys=KeyRing.load(("one",), None)) as bench:
        assert (await bench.client.get("/v1/kv")).status_code == 401
