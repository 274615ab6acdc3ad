"""The engine whole: are its greedy tokens transformers', how long is a decode step, how fast is an offline batch?"""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.gpu.clock import free_bytes
from bench.gpu.models import decoder_of, llama_8b, qwen3_config, random_decoder, random_hf_model, tiny_llama
from bench.gpu.report import Finding, share, skipped
from engine.batch import Batch, Row, SlotStart
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from kvpool.pool import BlockPool
from kvpool.table import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.loop import Scheduler
from scheduler.request import Request

GREEDY = SamplingParams(temperature=0.0)
Prompts = Sequence[tuple[int, ...]]


def serve(engine: Engine, config: EngineConfig, prompts: Prompts, num_out: int) -> list[list[int]]:
    """All prompts at once through the real scheduler; the tokens of each."""

    async def run() -> list[list[int]]:
        settings = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=engine.info.max_model_len,
            block_size=config.block_size,
            enable_prefix_caching=False,
        )
        scheduler = Scheduler(engine, BlockPool(engine.info.num_blocks), settings)
        loop = asyncio.create_task(scheduler.run())
        requests = [Request(f"r{i}", prompt, GREEDY, num_out) for i, prompt in enumerate(prompts)]
        handles = [scheduler.submit(request) for request in requests]
        answers = await asyncio.gather(*(collect(handle) for handle in handles))
        scheduler.drain()
        await loop
        return list(answers)

    async def collect(handle: Any) -> list[int]:
        tokens: list[int] = []
        async for events in handle:
            for event in events:
                if event.error is not None:
                    raise RuntimeError(event.error)
                tokens += event.token_ids
        return tokens

    return asyncio.run(run())


def random_prompts(count: int, lengths: tuple[int, int], vocab_size: int) -> Prompts:
    rng = random.Random(3)
    return [tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------ equality


def equality(device: torch.device) -> Iterator[Finding]:
    """A small random model in float32, several requests together, with and without recorded decode steps."""
    model = random_hf_model(qwen3_config(tiny=True), torch.float32, device)
    prompts = random_prompts(6, (3, 150), model.config.vocab_size)
    expected = [_greedy(model, prompt, num_out=48) for prompt in prompts]
    for eager in (True, False) if device.type == "cuda" else (True,):
        config = EngineConfig(num_kv_blocks=256, max_num_seqs=8, max_model_len=512, enforce_eager=eager)
        engine = Engine.from_decoder(decoder_of(model), config)
        got = serve(engine, config, prompts, num_out=48)
        engine.close()
        num_equal = sum(a == b for a, b in zip(got, expected, strict=True))
        what = f"greedy tokens of {len(prompts)} requests, {_how(device, eager)}"
        verdict = "ok" if num_equal == len(prompts) else "FAIL"
        details = {"attention": engine.info.attention_backend, "reason": engine.info.attention_reason}
        yield Finding("transformers", what, f"{num_equal} of {len(prompts)} equal", verdict, details)


def _greedy(model: Any, prompt: tuple[int, ...], num_out: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    options = {"do_sample": False, "max_new_tokens": num_out, "min_new_tokens": num_out, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


# --------------------------------------------------------------------------------------------------------- decode steps


def steps(device: torch.device, bandwidth: float, tiny: bool) -> Iterator[Finding]:
    """Whole decode steps, sampling included, of one sequence with a context of 1,024 tokens."""
    spec = tiny_llama() if tiny else llama_8b()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    part = "decode step"
    num_past, num_steps = (64, 10) if tiny else (1024, 60)
    if not tiny and free_bytes(device) < 20 << 30:
        yield skipped(part, "Llama 3.1 8B's shape", "needs 20 GiB of free memory")
        return
    decoder = random_decoder(spec, dtype, device)
    for eager in (True, False) if device.type == "cuda" else (True,):
        config = EngineConfig(
            num_kv_blocks=256, max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=2048, enforce_eager=eager
        )
        engine = Engine.from_decoder(decoder, config)
        seconds = _step_s(engine, config, num_past, num_steps)
        engine.close()
        unread_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize  # a step looks up one row of the embedding
        step_bytes = decoder.weight_bytes - unread_bytes + num_past * engine.info.layout.bytes_per_token
        reached = share(step_bytes / seconds, bandwidth, "the bandwidth bound")
        value = f"{seconds * 1e3:.2f} ms, {1 / seconds:.0f} tok/s, {reached}"
        name = "tiny" if tiny else "Llama 3.1 8B's shape"
        details = {"seconds": seconds, "bytes": step_bytes, "attention": engine.info.attention_backend}
        yield Finding(part, f"{name}, batch 1, {_how(device, eager)}", value, details=details)


def _step_s(engine: Engine, config: EngineConfig, num_past: int, num_steps: int) -> float:
    """Median wall time of a step that decodes one token."""
    prompt = tuple(i % 500 for i in range(num_past))
    blocks = tuple(range(blocks_for(num_past + num_steps + 1, config.block_size)))
    start = SlotStart(0, GREEDY, 0, prompt)
    output = engine.step_sync(Batch(1, (start,), (), (Row(0, 0, prompt, 0, blocks, sample=True),)))
    times = []
    for step in range(num_steps):
        token_ids = output.rows[0].token_ids
        began = time.perf_counter()
        output = engine.step_sync(Batch(2 + step, (), (), (Row(0, num_past + step, token_ids, 0, (), sample=True),)))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# -------------------------------------------------------------------------------------------------------------- offline


def offline(device: torch.device, tiny: bool, with_peer: bool) -> Iterator[Finding]:
    """Many requests at once: output tokens per second here, and with transformers' continuous batching."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count, lengths, num_out = (6, (4, 40), 8) if tiny else (256, (32, 512), 128)
    part, name = "offline", "tiny" if tiny else "Qwen3 0.6B's shape"
    what = f"{name}, {count} requests, {lengths[0]}-{lengths[1]} tokens in, {num_out} out"
    model = random_hf_model(qwen3_config(tiny), dtype, device, attention="sdpa")
    prompts = random_prompts(count, lengths, model.config.vocab_size)
    ours_s, details = _our_run(decoder_of(model), device, prompts, num_out)
    ours = count * num_out / ours_s
    yield Finding(part, what, f"{ours:.0f} tok/s", details={"seconds": ours_s, **details})
    if not with_peer:
        return
    try:
        theirs_s = _their_run(model, prompts, num_out)
    except Exception as error:  # noqa: BLE001 - whatever stops the peer must not cost our own figures
        yield skipped(part, "the same, transformers' continuous batching", f"{type(error).__name__}: {error}"[:100])
        return
    theirs = count * num_out / theirs_s
    value = f"{theirs:.0f} tok/s; this engine: {ours / theirs:.2f} times that"
    yield Finding(part, "the same, transformers' continuous batching", value, details={"seconds": theirs_s})


def _our_run(decoder: Any, device: torch.device, prompts: Prompts, num_out: int) -> tuple[float, dict[str, Any]]:
    """Seconds after a short warm-up run, and how long loading took."""
    longest = max(len(prompt) for prompt in prompts) + num_out
    on_gpu = device.type == "cuda"
    config = EngineConfig(
        gpu_memory_utilization=0.6,
        num_kv_blocks=None if on_gpu else 256,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=8192 if on_gpu else 512,
        max_model_len=-(-longest // 16) * 16,
    )
    began = time.perf_counter()
    engine = Engine.from_decoder(decoder, config)
    load_s = time.perf_counter() - began
    serve(engine, config, prompts[:4], num_out=4)
    began = time.perf_counter()
    answers = serve(engine, config, prompts, num_out)
    seconds = time.perf_counter() - began
    engine.close()
    if any(len(answer) != num_out for answer in answers):
        raise RuntimeError("a request got too few tokens")
    return seconds, {"load_s": load_s, "num_kv_blocks": engine.info.num_blocks}


def _their_run(model: Any, prompts: Prompts, num_out: int) -> float:
    """Seconds of `generate_batch` the second time: the first one sizes its cache, for these requests, and warms up."""
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=False, max_new_tokens=num_out, eos_token_id=-1, pad_token_id=0)
    inputs = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        model.generate_batch(inputs, generation_config=settings, persistent_manager=True)
        began = time.perf_counter()
        outputs = model.generate_batch(inputs, generation_config=settings, persistent_manager=True)
        seconds = time.perf_counter() - began
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    model.destroy_cached_continuous_batching_manager()
    if num_tokens != len(prompts) * num_out:
        raise RuntimeError(f"{num_tokens} tokens instead of {len(prompts) * num_out}")
    return seconds


def _how(device: torch.device, eager: bool) -> str:
    return "eager" if eager else "CUDA graphs"
