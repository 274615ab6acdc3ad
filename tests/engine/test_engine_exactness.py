"""The cache is exact: whatever happens around a request, its tokens are those that transformers gives it alone.

Each variation runs the real scheduler over the real engine, on tiny random models of three families (plain, QK-norm,
sliding window) in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.load import load_decoder
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from scheduler.request import Request
from tests.fakes.naive_attention import naive_greedy
from tests.fakes.serving import MAX_NUM_SEQS, Answer, reference_greedy, serve
from tests.fakes.tiny_models import load_reference, make_tiny_model

FAMILIES = ("llama", "qwen3", "mistral")
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [
    tuple((a * i * i + b * i + c) % 250 for i in range(n))
    for a, b, c, n in [(7, 1, 3, 5), (3, 5, 9, 33), (11, 2, 1, 100), (5, 8, 2, 16)]
]
STRANGERS = [
    Request(
        f"stranger-{i}", tuple((13 * i + 5 * j) % 250 for j in range(3 + 17 * i)), SamplingParams(seed=i), 20 + 9 * i
    )
    for i in range(6)
]


@dataclass(frozen=True)
class Model:
    """A tiny model on disk, and what transformers continues each of `PROMPTS` with."""

    folder: Path
    expected: list[list[int]]

    def engine(self, block_size: int = 16, attention_backend: str = "auto") -> Engine:
        config = EngineConfig(
            block_size=block_size,
            num_kv_blocks=-(-4096 // block_size),
            max_num_seqs=MAX_NUM_SEQS,
            attention_backend=attention_backend,
        )
        return Engine.load(resolve_model(str(self.folder)), config)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    reference = load_reference(folder)
    return Model(folder, [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    engine = model.engine()
    yield engine
    engine.close()


def greedy(prompts: Sequence[tuple[int, ...]], **overrides: object) -> list[Request]:
    return [Request(f"r{i}", prompt, GREEDY, NUM_TOKENS, **overrides) for i, prompt in enumerate(prompts)]


def tokens_of(answers: Sequence[Sequence[Answer]]) -> list[list[int]]:
    return [choices[0].token_ids for choices in answers[: len(PROMPTS)]]


def test_alone(engine: Engine, model: Model) -> None:
    for prompt, expected in zip(PROMPTS, model.expected, strict=True):
        [answers] = serve(engine, greedy([prompt]))
        assert tokens_of(answers) == [expected]


def test_batched_with_strangers(engine: Engine, model: Model) -> None:
    [answers] = serve(engine, [*greedy(PROMPTS), *STRANGERS])
    assert tokens_of(answers) == model.expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_prefilled_in_chunks(engine: Engine, model: Model, chunk: int) -> None:
    [answers] = serve(engine, greedy(PROMPTS), max_num_batched_tokens=chunk)
    assert tokens_of(answers) == model.expected


@pytest.mark.parametrize("block_size", [1, 3])
def test_other_block_sizes(model: Model, block_size: int) -> None:
    engine = model.engine(block_size)
    [answers] = serve(engine, [*greedy(PROMPTS), *STRANGERS[:2]], max_num_batched_tokens=40)
    assert tokens_of(answers) == model.expected
    engine.close()


def test_reference_backend(model: Model) -> None:
    engine = model.engine(attention_backend="reference")
    [answers] = serve(engine, greedy(PROMPTS), max_num_batched_tokens=50)
    assert tokens_of(answers) == model.expected
    engine.close()


def test_from_a_warm_prefix_cache(engine: Engine, model: Model) -> None:
    cold, warm = serve(engine, greedy(PROMPTS), [*greedy(PROMPTS), *STRANGERS[:3]])
    assert tokens_of(cold) == tokens_of(warm) == model.expected
    # full blocks only, and the last token of a prompt is always computed: the fourth is one whole block
    assert [choices[0].handle.num_cached_tokens for choices in warm[:4]] == [0, 32, 96, 15]


def test_continued_from_cached_output(engine: Engine, model: Model) -> None:
    """A later turn: prompt and half the answer of an earlier one, found in the cache, the tail computed anew."""
    longer = [(*prompt, *expected[:40]) for prompt, expected in zip(PROMPTS, model.expected, strict=True)]
    requests = [Request(f"t{i}", prompt, GREEDY, NUM_TOKENS - 40) for i, prompt in enumerate(longer)]
    _, answers = serve(engine, greedy(PROMPTS), requests)
    assert tokens_of(answers) == [expected[40:] for expected in model.expected]
    assert all(
        choices[0].handle.num_cached_tokens >= len(prompt) - 16 for choices, prompt in zip(answers, longer, strict=True)
    )


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_after_forced_preemption(engine: Engine, model: Model, use_prefix_cache: bool) -> None:
    """A pool of 14 blocks (224 tokens) for four sequences that need up to 164 tokens each."""
    requests = greedy(PROMPTS, use_prefix_cache=use_prefix_cache)
    [answers] = serve(
        engine, [*requests, *STRANGERS[:3]], num_blocks=14, max_num_batched_tokens=48, forecast_admission=False
    )
    assert tokens_of(answers) == model.expected
    assert sum(choices[0].handle.num_preemptions for choices in answers[:4]) > 0


def test_several_choices_share_a_prompt(engine: Engine, model: Model) -> None:
    [answers] = serve(engine, greedy(PROMPTS, num_choices=3), max_num_batched_tokens=64)
    assert [[answer.token_ids for answer in choices] for choices in answers] == [[e] * 3 for e in model.expected]


def test_without_any_cache(model: Model) -> None:
    decoder = load_decoder(resolve_model(str(model.folder)), torch.float32, torch.device("cpu"), lambda *_: None)
    for prompt, expected in zip(PROMPTS, model.expected, strict=True):
        assert naive_greedy(decoder, prompt, NUM_TOKENS) == expected


def test_seeded_draws_do_not_depend_on_company(engine: Engine) -> None:
    """The same seed gives the same tokens alone, in a crowd, in chunks, and after preemptions; another gives others."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, frequency_penalty=0.3)
    requests = [Request(f"s{i}", prompt, params, NUM_TOKENS, num_choices=2) for i, prompt in enumerate(PROMPTS)]
    alone = [serve(engine, [request])[0][0] for request in requests]
    crowd = serve(engine, [*requests, *STRANGERS], max_num_batched_tokens=33)[0]
    tight = serve(engine, [*requests, *STRANGERS[:1]], num_blocks=16, forecast_admission=False)[0]
    expected = [[answer.token_ids for answer in choices] for choices in alone]
    for other in (crowd, tight):
        assert [[answer.token_ids for answer in choices] for choices in other[:4]] == expected
    assert sum(choices[0].handle.num_preemptions for choices in tight) > 0
    assert all(first != second for first, second in expected)
