"""`POST /v1/capacity`: what is said of a request before it is sent."""

import asyncio
from typing import Any

import pytest

from tests.server.conftest import Bench, running


async def ask(bench: Bench, **body: Any) -> dict[str, Any]:
    answer = await bench.post("/v1/capacity", {"max_tokens": 10, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_before_anything_was_measured(bench: Bench) -> None:
    got = await ask(bench, prompt_tokens=100, max_tokens=50)
    assert got == {
        "object": "capacity",
        "prompt_tokens": 100,
        "max_tokens": 50,
        "cached_tokens": 0,
        "accepted": True,
        "refusal": None,
        "fits_now": True,
        "predicted": None,
        "concurrent": 8,  # slots; 256 blocks would hold 25 of 10 blocks each
        "load": {"running": 0, "waiting": 0, "kv_tokens": 4096, "kv_tokens_used": 0},
    }
    assert (await ask(bench, prompt_tokens=600, max_tokens=201))["concurrent"] == 256 // 50


async def test_an_idle_server_that_has_worked() -> None:
    async with running(engine={"step_s": 0.01}) as bench:
        await bench.complete("x" * 40, max_tokens=20)
        got = (await ask(bench, prompt="y" * 40, max_tokens=20))["predicted"]
        assert got["queue_wait_s"] == 0.0
        assert 0.009 < got["ttft_s"] < 0.1
        assert got["ttft_s"] + 19 * 0.009 < got["finish_s"] < 2.0


async def test_what_the_cache_has_is_counted(bench: Bench) -> None:
    await bench.complete("x" * 40, max_tokens=1)
    assert (await ask(bench, prompt="x" * 40))["cached_tokens"] == 32
    assert (await ask(bench, prompt="x" * 40, cache_salt="other"))["cached_tokens"] == 0
    assert (await ask(bench, prompt_tokens=40))["cached_tokens"] == 0
    messages = [{"role": "user", "content": "x" * 40}]
    await bench.chat(messages, max_tokens=1)
    got = await ask(bench, messages=messages)
    assert got["cached_tokens"] == got["prompt_tokens"] // 16 * 16


async def test_behind_others() -> None:
    gate = asyncio.Event()
    async with running(engine={"gate": gate}, scheduler={"max_num_seqs": 1}) as bench:
        first = asyncio.create_task(bench.complete("a" * 20, max_tokens=5))
        await bench.steps(1)
        got = await ask(bench, prompt_tokens=20)
        assert not got["fits_now"]
        assert got["accepted"]
        assert got["concurrent"] == 1
        assert got["load"]["running"] == 1
        gate.set()
        await first
        got = await ask(bench, prompt_tokens=20)
        assert got["fits_now"]
        assert got["load"]["running"] == 0


async def test_what_would_be_refused() -> None:
    gate = asyncio.Event()
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with running(engine={"gate": gate}, scheduler=limits) as bench:
        got = await ask(bench, prompt_tokens=2000)
        assert not got["accepted"]
        assert got["refusal"]["code"] == "context_length_exceeded"
        assert (got["predicted"], got["concurrent"], got["fits_now"]) == (None, None, False)
        got = await ask(bench, prompt_tokens=10**12)
        assert got["prompt_tokens"] == 10**12
        assert f"{10**12} prompt tokens" in got["refusal"]["message"]
        tasks = [asyncio.create_task(bench.complete("a" * 20, max_tokens=5)) for _ in range(2)]
        await bench.steps(1)
        await asyncio.sleep(0.01)
        got = await ask(bench, prompt_tokens=20)
        assert not got["accepted"]
        assert got["refusal"]["code"] == "queue_full"
        assert got["refusal"]["retry_after_s"] >= 1.0
        gate.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": "x", "prompt_tokens": 4, "max_tokens": 5}, "prompt_tokens"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, "prompt"),
        ({"prompt": "", "max_tokens": 5}, "prompt"),
        ({"prompt_tokens": 0, "max_tokens": 5}, "prompt_tokens"),
        ({"prompt": "x"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
async def test_wrong_bodies(bench: Bench, body: dict[str, Any], param: str) -> None:
    answer = await bench.post("/v1/capacity", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_an_unknown_model(bench: Bench) -> None:
    answer = await bench.post("/v1/capacity", {"model": "nobody", "prompt_tokens": 4, "max_tokens": 5})
    assert answer.status_code == 404


async def test_asking_queues_nothing(bench: Bench) -> None:
    await ask(bench, prompt="x" * 40)
    assert not bench.engine.batches
