"""A quantized cache is exact with itself: whatever happens around a request, its tokens are those of its own cold run.

A token is quantized once, by itself, and attention always reads the codes, its own step's included. So chunks, cached
prefixes, company and preemption change nothing, as in full precision.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from kvpool.layout import KVLayout
from scheduler.request import Request
from tests.fakes.serving import MAX_NUM_SEQS, Answer, serve
from tests.fakes.tiny_models import make_tiny_model

NUM_TOKENS = 64
PROMPTS = [
    tuple((a * i * i + b * i + c) % 250 for i in range(n))
    for a, b, c, n in [(7, 1, 3, 5), (3, 5, 9, 33), (11, 2, 1, 100), (5, 8, 2, 16)]
]
STRANGERS = [
    Request(f"x{i}", tuple((13 * i + 5 * j) % 250 for j in range(3 + 17 * i)), SamplingParams(seed=i), 20 + 9 * i)
    for i in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, kv_cache_dtype: str, backend: str = "auto", **settings: int) -> Engine:
    settings = {"num_kv_blocks": 256, **settings}
    config = EngineConfig(
        max_num_seqs=MAX_NUM_SEQS, attention_backend=backend, kv_cache_dtype=kv_cache_dtype, **settings
    )
    return Engine.load(resolve_model(str(folder)), config)


@pytest.fixture(scope="module", params=["int8", "fp8"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = load(folder, request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def cold(engine: Engine) -> list[list[int]]:
    """What each prompt gets alone, in one piece, from an empty cache."""
    return [tokens_of(serve(engine, greedy([prompt]))[0])[0] for prompt in PROMPTS]


def greedy(prompts: Sequence[tuple[int, ...]], **overrides: object) -> list[Request]:
    params = SamplingParams(temperature=0.0)
    return [Request(f"r{i}", prompt, params, NUM_TOKENS, **overrides) for i, prompt in enumerate(prompts)]


def tokens_of(answers: Sequence[Sequence[Answer]]) -> list[list[int]]:
    return [choices[0].token_ids for choices in answers[: len(PROMPTS)]]


def test_batched_with_strangers(engine: Engine, cold: list[list[int]]) -> None:
    [answers] = serve(engine, [*greedy(PROMPTS), *STRANGERS])
    assert tokens_of(answers) == cold


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prefilled_in_chunks(engine: Engine, cold: list[list[int]], chunk: int) -> None:
    [answers] = serve(engine, greedy(PROMPTS), max_num_batched_tokens=chunk)
    assert tokens_of(answers) == cold


def test_from_a_warm_prefix_cache(engine: Engine, cold: list[list[int]]) -> None:
    _, warm = serve(engine, greedy(PROMPTS), [*greedy(PROMPTS), *STRANGERS[:3]])
    assert tokens_of(warm) == cold
    assert [choices[0].handle.num_cached_tokens for choices in warm[:4]] == [0, 32, 96, 15]


def test_continued_from_cached_output(engine: Engine, cold: list[list[int]]) -> None:
    longer = [(*prompt, *answer[:40]) for prompt, answer in zip(PROMPTS, cold, strict=True)]
    requests = [Request(f"t{i}", p, SamplingParams(temperature=0.0), NUM_TOKENS - 40) for i, p in enumerate(longer)]
    _, answers = serve(engine, greedy(PROMPTS), requests)
    assert tokens_of(answers) == [answer[40:] for answer in cold]
    assert sum(choices[0].handle.num_cached_tokens for choices in answers) > 200


def test_after_forced_preemption(engine: Engine, cold: list[list[int]]) -> None:
    [answers] = serve(
        engine, [*greedy(PROMPTS), *STRANGERS[:3]], num_blocks=14, max_num_batched_tokens=48, forecast_admission=False
    )
    assert tokens_of(answers) == cold
    assert sum(choices[0].handle.num_preemptions for choices in answers) > 0


def test_forks_share_the_prompt_and_copy_scales_with_codes(engine: Engine, cold: list[list[int]]) -> None:
    [answers] = serve(engine, greedy(PROMPTS, num_choices=3), max_num_batched_tokens=64)
    assert [[answer.token_ids for answer in choices] for choices in answers] == [[tokens] * 3 for tokens in cold]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_agree(folder: Path, engine: Engine, cold: list[list[int]], backend: str) -> None:
    name = {"int8": "int8", "float8_e4m3fn": "fp8"}[engine.info.kv_dtype]
    other = load(folder, name, backend)
    [answers] = serve(other, greedy(PROMPTS))
    assert tokens_of(answers) == cold
    other.close()


def test_info_tells_what_is_stored(folder: Path, engine: Engine) -> None:
    layout, full = engine.info.layout, load(folder, "auto")
    assert layout == KVLayout(*(getattr(full.info.layout, n) for n in KVLayout.__slots__[:4]), 1, 2)
    assert engine.info.kv_bytes == 256 * layout.bytes_per_block
    assert full.info.kv_dtype == full.info.dtype
    full.close()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_same_memory_holds_more_blocks(folder: Path, name: str) -> None:
    engines = [load(folder, dtype, num_kv_blocks=None, kv_cache_memory_bytes=1 << 20) for dtype in ("auto", name)]
    full, quantized = (engine.info for engine in engines)
    head_dim = full.layout.head_dim
    wanted = full.num_blocks * 4 * head_dim / (head_dim + 2)
    assert wanted - 1 <= quantized.num_blocks <= wanted + 4 * head_dim / (head_dim + 2)
    for engine in engines:
        engine.close()
