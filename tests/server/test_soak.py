"""Two thousand mixed requests over real sockets, one in five wrong or given up: nothing is leaked, nothing grows."""

import asyncio
import gc
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.limits import KeyRing
from server.metrics import ModelLabels
from tests.server.fields.rows import SCHEMA, tool
from tests.server.live import Live, live_server

NUM_REQUESTS, AT_ONCE = 2000, 16
NUM_WARM = 800  # requests after which caches are filled and sizes are compared
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GAUGES = (
    "quire_requests_running",
    "quire_requests_waiting",
    "quire_kv_usage_ratio",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
WORDS = ("hello", "wörld", "日本", "a\nb", "1, 2, 3", '{"v": "yes"}', "<tool_call>", "😀😀")

Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]


def chat_body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    text = f"{rng.choice(WORDS)} SAY:{rng.choice(WORDS)}|"
    return {"messages": [{"role": "user", "content": text}], **common(rng), **fields}


def text_body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"{rng.choice(WORDS)} SAY:{rng.choice(WORDS)}|", **common(rng), **fields}


def common(rng: random.Random) -> dict[str, Any]:
    """Few enough different answers that what is remembered of them on purpose soon stops to grow."""
    return {"max_tokens": rng.randint(1, 12), "temperature": 0, "seed": rng.randrange(2)}


def posts(path: str, make: Callable[[random.Random], dict[str, Any]], status: int = 200) -> Ask:
    """A request that gets this status; a stream is read to its end."""

    async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
        body = make(rng)
        answer = await client.post(path, json=body)
        assert answer.status_code == status, (body, answer.text)
        if body.get("stream") and status == 200:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        return str(status)

    return ask


def given_up(make: Callable[[random.Random], dict[str, Any]], path: str) -> Ask:
    """A long request whose client leaves while it waits, is being answered, or streams."""

    async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
        body = {**make(rng), "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.5}
        task = asyncio.create_task(client.post(path, json=body))
        await asyncio.wait([task], timeout=rng.choice([0.0, 0.005, 0.05]))
        task.cancel()
        await asyncio.wait([task])
        return "given up"

    return ask


GOOD: tuple[Ask, ...] = (
    posts(CHAT, chat_body),
    posts(CHAT, lambda rng: chat_body(rng, stream=True, stream_options={"include_usage": True})),
    posts(CHAT, lambda rng: chat_body(rng, n=2, temperature=1.5, logprobs=True, top_logprobs=2)),
    posts(CHAT, lambda rng: chat_body(rng, tools=[tool("f")], tool_choice="required", stream=rng.random() < 0.5)),
    posts(CHAT, lambda rng: chat_body(rng, tools=[tool("f")], response_format={"type": "json_object"})),
    posts(CHAT, lambda rng: chat_body(rng, stop=["l", "本"], stream=True)),
    posts(COMPLETIONS, text_body),
    posts(COMPLETIONS, lambda rng: text_body(rng, stream=True, n=2)),
    posts(COMPLETIONS, lambda rng: text_body(rng, prompt=["SAY:a|", [72, 105]], echo=True, logprobs=1)),
    posts(COMPLETIONS, lambda rng: text_body(rng, best_of=3, structured_outputs={"json": SCHEMA})),
    posts(COMPLETIONS, lambda rng: text_body(rng, max_tokens=0, echo=True, logprobs=0)),
    posts("/tokenize", lambda rng: {"prompt": rng.choice(WORDS) * rng.randrange(1, 9)}),
)
BAD: tuple[Ask, ...] = (
    given_up(text_body, COMPLETIONS),
    given_up(chat_body, CHAT),
    given_up(lambda rng: text_body(rng, prompt=["count", "SAY:more|"], n=2), COMPLETIONS),
    posts(CHAT, lambda rng: chat_body(rng, temperature=9), 400),
    posts(CHAT, lambda rng: {"messages": []}, 400),
    posts(COMPLETIONS, lambda rng: text_body(rng, prompt="x" * 3000), 400),
    posts(COMPLETIONS, lambda rng: text_body(rng, model="nobody"), 404),
    posts(COMPLETIONS, lambda rng: text_body(rng, structured_outputs={"regex": "(["}), 400),
    posts(COMPLETIONS, lambda rng: text_body(rng, allowed_token_ids=[97], bad_words=["a"], stream=True), 400),
    posts("/v1/none", lambda rng: {}, 404),
)


async def send(live: Live, num_requests: int, seed: int) -> Counter[str]:
    """That many requests, `AT_ONCE` at any time; how they ended."""
    outcomes: Counter[str] = Counter()
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=live.url, limits=limits, headers=headers, timeout=60) as client:
        waiting = deque(random.Random(rng.random()) for _ in range(num_requests))

        async def work() -> None:
            while waiting:
                own = waiting.popleft()
                outcomes[await own.choice(BAD if own.random() < 0.2 else GOOD)(client, own)] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes


def settle(live: Live) -> None:
    """Wait until nothing runs, and check the books."""
    scheduler = live.bench.state.served.scheduler
    deadline = time.monotonic() + 20
    while (stats := scheduler.stats()).num_running or stats.num_waiting or stats.step_running_s is not None:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    time.sleep(0.1)  # the answers to those who left are counted a little later
    scheduler.check()
    assert scheduler.stats().pool.num_referenced == 0


def sizes() -> tuple[int, int]:
    """Objects alive, and resident bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(gc.get_objects()), pages * 4096


def metrics_of(live: Live) -> dict[str, list[Any]]:
    families = text_string_to_metric_families(httpx.get(f"{live.url}/metrics").text)
    samples: dict[str, list[Any]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


@pytest.mark.slow
def test_two_thousand_mixed_requests_leave_nothing_behind() -> None:
    keys = KeyRing.load(["secret"])
    # What the fake engine and the test's own metrics remember would look like a leak.
    engine = {"max_num_seqs": 8, "batches": deque(maxlen=1), "starts": deque(maxlen=1)}
    with live_server(keys=keys, engine=engine) as live:
        scheduler = live.bench.state.served.scheduler
        live.bench.metrics.attach(ModelLabels("tiny", "float32", "cpu", 1024, 16, 256), scheduler.stats)
        outcomes = asyncio.run(send(live, NUM_WARM, seed=1))
        settle(live)
        num_objects, resident_bytes = sizes()
        outcomes += asyncio.run(send(live, NUM_REQUESTS - NUM_WARM, seed=2))
        settle(live)
        num_objects_then, resident_bytes_then = sizes()
        samples = metrics_of(live)
    assert outcomes.total() == NUM_REQUESTS
    assert outcomes["given up"] > 60
    assert outcomes["400"] + outcomes["404"] > 150
    assert keys.find("secret").num_running == 0
    for name in GAUGES:
        assert [sample.value for sample in samples[name]] == [0], name
    held = [sample.value for sample in samples["quire_kv_blocks"] if sample.labels["state"] == "referenced"]
    assert held == [0]
    counted = sum(sample.value for sample in samples["quire_requests_total"])
    never_seen = NUM_REQUESTS - counted  # given up before the server had read them
    assert 0 <= never_seen <= outcomes["given up"]
    assert not any(sample.labels["status"].startswith("5") for sample in samples["quire_requests_total"])
    assert num_objects_then - num_objects < (NUM_REQUESTS - NUM_WARM) / 2, "requests leave objects behind"
    assert resident_bytes_then - resident_bytes < 32 << 20
