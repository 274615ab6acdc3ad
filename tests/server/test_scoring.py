"""Prompts scored as evaluation harnesses ask for it: the real engine over HTTP gives transformers' loglikelihoods."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from server.app import create_app
from server.build import assemble, load
from server.config import ServerConfig
from server.limits import KeyRing
from server.metrics import Metrics
from server.state import ServerState
from tests.fakes.tiny_models import load_reference, make_tiny_model

NUM_ITEMS, AT_ONCE = 20, 8
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("smollm2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The model of `folder` behind the application, everything real but the socket."""
    config = ServerConfig(model=str(folder), dtype="float32", num_kv_blocks=128, max_num_seqs=8, threads=1)
    metrics = Metrics(version="test")
    loaded = await asyncio.to_thread(load, config, lambda phase, fraction: None)
    state = ServerState(config, metrics, KeyRing())
    served = assemble(loaded, config, metrics)
    state.set_ready(served)
    loop = asyncio.create_task(served.scheduler.run())
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client
    served.scheduler.stop()
    await loop
    served.structured.close()
    loaded.engine.close()


def items(vocab_size: int) -> list[tuple[list[int], int]]:
    """(context and continuation as ids, length of the context): what a multiple-choice task is scored with."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(NUM_ITEMS):
        length = 3 + int(torch.randint(40, (), generator=generator))
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        made.append((ids, 1 + index % (length - 1)))
    return made


def with_likeliest(reference: PreTrainedModel, item: tuple[list[int], int]) -> tuple[list[int], int]:
    """The same context with the continuation the model itself would choose."""
    ids, context = item[0][: item[1]], item[1]
    for _ in range(4):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids, context


@torch.no_grad()
def loglikelihood(reference: PreTrainedModel, ids: list[int], context: int) -> tuple[float, bool]:
    """The continuation's summed logprob, and whether greedy decoding would write it."""
    logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)[context - 1 : -1]
    wanted = torch.tensor(ids[context:])
    return float(logprobs.gather(1, wanted[:, None]).sum()), bool((logprobs.argmax(-1) == wanted).all())


def parsed(answer: dict[str, Any], contexts: list[int], end: int | None) -> list[tuple[float, bool]]:
    """As harnesses read an answer: the logprobs behind the context, without the generated token's when there is one."""
    results = []
    for choice, context in zip(sorted(answer["choices"], key=itemgetter("index")), contexts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context:end]
        tops = choice["logprobs"]["top_logprobs"][context:end]
        results.append((sum(logprobs), all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))))
    return results


@pytest.mark.parametrize("max_tokens", [1, 0])
async def test_loglikelihoods_and_greedy_flags_are_those_of_transformers(
    folder: Path, reference: PreTrainedModel, max_tokens: int
) -> None:
    tasks = items(reference.config.vocab_size)
    tasks += [with_likeliest(reference, item) for item in tasks[:4]]
    want = [loglikelihood(reference, ids, context) for ids, context in tasks]
    assert {greedy for _, greedy in want} == {True, False}
    fields = {"model": folder.name, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234}
    got: list[tuple[float, bool]] = []
    async with serving(folder) as client:
        for start in range(0, len(tasks), AT_ONCE):
            batch = tasks[start : start + AT_ONCE]
            body = {**fields, "prompt": [ids for ids, _ in batch], "echo": True}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == len(batch) * max_tokens
            for (ids, _), choice in zip(batch, answer["choices"], strict=True):
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert len(choice["logprobs"]["tokens"]) == len(ids) + max_tokens
            got += parsed(answer, [context for _, context in batch], -1 if max_tokens else None)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    for (mine, _), (theirs, _) in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)


async def test_perplexity_windows_overlap_the_prefix_cache(folder: Path, reference: PreTrainedModel) -> None:
    """The same long prefix again and again: a cached prefix may not lose its logprobs."""
    ids = [3 + 7 * i % 250 for i in range(200)]
    async with serving(folder) as client:
        for length in (100, 150, 200, 200):
            body = {"prompt": [ids[:length]], "max_tokens": 0, "echo": True, "logprobs": 0}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            total = sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
            assert total == pytest.approx(loglikelihood(reference, ids[:length], 1)[0], abs=TOLERANCE)


async def test_continuations_until_a_stop_are_transformers_own(folder: Path, reference: PreTrainedModel) -> None:
    """`generate_until`: token ids in, text out, greedy."""
    prompts = [ids for ids, _ in items(reference.config.vocab_size)[:4]]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    async with serving(folder) as client:
        choices = (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert choice["token_ids"] == ids[len(prompt) :]
