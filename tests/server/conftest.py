"""An application over a scripted engine: the real scheduler, sampler, tokenizer and text, no model, no sockets."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvpool.layout import KVLayout
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.loop import Scheduler
from server.app import create_app
from server.config import ServerConfig
from server.limits import KeyRing
from server.metrics import Metrics
from server.state import Served, ServerState
from server.text.own_template import OwnTemplates
from server.text.reasoning import detect_reasoning
from server.text.structured import StructuredCompiler
from server.text.template import ChatTemplate
from server.text.tools.check import ToolCheck
from server.text.tools.registry import select_dialect
from tests.fakes.byte_tokenizer import EOS_ID, byte_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string and 'RAISE' in m.content %}{{ raise_exception('no RAISE') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if mood is defined %}({{ mood }}){% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REASONING_TEMPLATE = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@dataclass
class Bench:
    """A running application and a client of it."""

    client: httpx.AsyncClient
    engine: ScriptedEngine
    state: ServerState
    metrics: Metrics
    counted: list[tuple[str, int, str, str]]

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **kwargs)

    async def chat(self, content: str | list[Any] = "SAY:hello|", **fields: Any) -> httpx.Response:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})

    async def complete(self, prompt: Any = "SAY:hello|", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, `[DONE]` included as a string."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return events_of(answer.text)

    async def steps(self, number: int) -> None:
        """Wait until the engine has begun that many steps."""
        while len(self.engine.batches) < number:  # noqa: ASYNC110  the engine has no event to wait for
            await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Wait until nothing runs, and check that nothing was left behind."""
        scheduler = self.state.served.scheduler
        for _ in range(2000):
            stats = scheduler.stats()
            if not stats.num_running and not stats.num_waiting and stats.step_running_s is None:
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError("requests are still running")
        scheduler.check()
        assert scheduler.stats().pool.num_referenced == 0


def events_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


class CountingMetrics(Metrics):
    """Real metrics that also remember what they were told."""

    def __init__(self) -> None:
        super().__init__(version="test")
        self.ended: list[tuple[str, int, str, str]] = []

    def request_ended(self, endpoint: str, status: int, finish_reason: str, key: str) -> None:
        self.ended.append((endpoint, status, finish_reason, key))
        super().request_ended(endpoint, status, finish_reason, key)


@asynccontextmanager
async def running(
    *,
    keys: KeyRing | None = None,
    template: str | None = TEMPLATE,
    engine: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    served: dict[str, Any] | None = None,
    words: tuple[bytes, ...] = (),
    **settings: Any,
) -> AsyncIterator[Bench]:
    """An application with these server settings, scheduler settings and fields of the served model."""
    config = ServerConfig(**settings)
    tokenizer = byte_tokenizer(words)
    fake = ScriptedEngine(tokenizer, tokenizer.vocab_size, EOS_ID, **(engine or {}))
    policy = SchedulingPolicy(config.scheduling_policy)
    sched_config = SchedulerConfig(
        **{"max_num_seqs": 8, "max_model_len": 1024, "check_invariants": True, "policy": policy, **(scheduler or {})}
    )
    metrics = CountingMetrics()
    loop = Scheduler(fake, BlockPool(256), sched_config, observer=metrics)
    reasoning = detect_reasoning(template)
    model = Served(
        model_names=("tiny", "org/tiny"),
        created=1,
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokenizer) if template else None,
        own_templates=OwnTemplates(tokenizer.special_tokens),
        scheduler=loop,
        structured=StructuredCompiler(tokenizer, tokenizer.vocab_size, frozenset({EOS_ID})),
        tool_dialect=select_dialect(config.tool_call_parser, template),
        tool_check=ToolCheck(),
        reasoning=None if reasoning == "none" else reasoning,
        generation_defaults={},
        stop_token_ids=frozenset({EOS_ID}),
        max_model_len=sched_config.max_model_len,
        vocab_size=tokenizer.vocab_size,
        namespace=("tiny",),
        fingerprint="fp_test",
        dtype="float32",
        kv_layout=KVLayout(2, 1, 8, sched_config.block_size, 4),
        kv_dtype="float32",
    )
    model = dataclasses.replace(model, **(served or {}))
    state = ServerState(config, metrics, keys or KeyRing())
    state.set_ready(model)
    task = asyncio.create_task(loop.run())
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
        yield Bench(client, fake, state, metrics, metrics.ended)
    loop.stop()
    await asyncio.wait_for(task, 5)
    fake.sampler.close()
    model.structured.close()
    await model.own_templates.close()


Runner = Callable[..., Any]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running() as ready:
        yield ready
        await ready.idle()
