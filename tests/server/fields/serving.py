"""How a request is treated, and the fields only taken note of."""

import asyncio
import dataclasses
from typing import Any

from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.server.conftest import Bench, running
from tests.server.fields.rows import ask, body, names, prompt_of, row


@row("model")
async def _(bench: Bench, kind: str) -> None:
    assert (await body(bench, kind, model="org/tiny"))["model"] == "org/tiny"
    assert (await body(bench, kind))["model"] == "tiny"
    assert (await ask(bench, kind, model="nobody")).status_code == 404


@row("truncate_prompt_tokens")
async def _(bench: Bench, kind: str) -> None:
    long = "x" * 2000 + "SAY:hello|"
    answer = await body(bench, kind, long, truncate_prompt_tokens=40)
    assert answer["usage"]["prompt_tokens"] == 40
    assert len(names(answer)) == 1
    assert (await body(bench, kind, long, truncate_prompt_tokens=-1, max_tokens=24))["usage"]["prompt_tokens"] == 1000
    assert (await ask(bench, kind, long)).json()["error"]["code"] == "context_length_exceeded"
    assert (await ask(bench, kind, truncate_prompt_tokens=0)).status_code == 400


@row("add_special_tokens")
async def _(bench: Bench, kind: str) -> None:
    async with running() as other:
        with_bos = byte_tokenizer(add_bos=True)
        other.state.set_ready(dataclasses.replace(other.state.served, tokenizer=with_bos))
        by_default = kind == "completion"
        for given, has_bos in ((True, True), (False, False), (None, by_default)):
            prompt = await prompt_of(other, kind, add_special_tokens=given)
            assert prompt.startswith("<|bos|>") == has_bos
        doubled = await prompt_of(other, "completion", "<|bos|>SAY:hello|", add_special_tokens=True)
        assert doubled.count("<|bos|>") == 1


@row("cache_salt")
async def _(bench: Bench, kind: str) -> None:
    async def cached(**fields: Any) -> int:
        answer = await body(bench, kind, "y" * 64 + "SAY:a|", max_tokens=1, **fields)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    cold, warm = await cached(), await cached()
    assert (cold, warm >= 64) == (0, True)
    assert [await cached(cache_salt="a"), await cached(cache_salt="a")] == [0, warm]
    for wrong in ("", "x" * 129):
        assert (await ask(bench, kind, cache_salt=wrong)).status_code == 400


@row("cache_explain")
async def _(bench: Bench, kind: str) -> None:
    long = "y" * 64 + "SAY:a|"
    [miss] = (await body(bench, kind, long, max_tokens=1, cache_explain=True))["cache_explain"]
    [hit] = (await body(bench, kind, long, max_tokens=1, cache_explain=True))["cache_explain"]
    assert (miss["reason"], hit["reason"]) == ("never_seen", None)
    assert "cache_explain" not in await body(bench, kind, long, max_tokens=1)


@row("priority")
async def _(bench: Bench, kind: str) -> None:
    assert names(await body(bench, kind, priority=3)) == {"priority"}
    assert not names(await body(bench, kind, priority=0))
    async with running(scheduling_policy="priority", scheduler={"max_num_seqs": 1}) as other:
        done: list[int] = []

        async def one(priority: int) -> None:
            assert not names(await body(other, kind, priority=priority))
            done.append(priority)

        gate = other.engine.gate = asyncio.Event()
        first = asyncio.create_task(one(-100))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(one(priority)) for priority in (5, 1, 3)]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(first, *others)
        assert done == [-100, 1, 3, 5]


@row("timeout_ms")
async def _(bench: Bench, kind: str) -> None:
    async with running(engine={"step_s": 0.02}) as other:
        answer = await body(other, kind, "SAY:" + "x" * 200 + "|", timeout_ms=300, max_tokens=150)
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline_exceeded")
        other.engine.gate = asyncio.Event()
        late = await ask(other, kind, timeout_ms=30)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        other.engine.gate.set()


@row("queue_timeout_ms")
async def _(bench: Bench, kind: str) -> None:
    async with running(scheduler={"max_num_seqs": 1}) as other:
        gate = other.engine.gate = asyncio.Event()
        running_one = asyncio.create_task(ask(other, kind))
        await asyncio.sleep(0.02)
        waiting = await ask(other, kind, queue_timeout_ms=20)
        by_header = await other.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-slo-ttft-ms": "20"})
        gate.set()
        assert {waiting.status_code, by_header.status_code} == {504}
        assert (await running_one).status_code == 200, "it bounds the wait, not the work"


NOTED = {
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
}


@row(*NOTED)
async def _(bench: Bench, kind: str) -> None:
    answer = await ask(bench, kind, **NOTED)
    assert names(answer.json()) == set(NOTED) == set(answer.headers["x-ignored-params"].split(","))
    quiet = await ask(bench, kind, store=False, service_tier="auto")
    assert "warnings" not in quiet.json()
    assert "x-ignored-params" not in quiet.headers
