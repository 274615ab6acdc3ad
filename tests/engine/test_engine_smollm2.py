"""The embedded model end to end: the scheduler and engine give the greedy tokens of transformers, whatever goes on."""

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from scheduler.request import Request
from tests.fakes.serving import MAX_NUM_SEQS, reference_greedy, serve
from tests.fakes.smollm2 import smollm2_tokenizer

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
TEXTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "The first three laws of planetary motion were published by Johannes Kepler. " * 8,
)
STRANGERS = [Request(f"s{i}", tuple(range(40 + i, 200 + 31 * i)), SamplingParams(seed=i), 30) for i in range(2)]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(smollm2_tokenizer().encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """By transformers, with the weights as transformers itself reads them from the file."""
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30))
    loaded = load_gguf_checkpoint(str(resolve_model(None).path), return_tensors=True, model_to_load=names)
    model = LlamaForCausalLM(LlamaConfig(**loaded["config"])).eval()
    model.load_state_dict(loaded["tensors"], strict=False)
    model.tie_weights()
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(dtype="float32", num_kv_blocks=256, max_num_seqs=MAX_NUM_SEQS)
    engine = Engine.load(resolve_model(None), config)
    yield engine
    engine.close()


def greedy(prompts: list[tuple[int, ...]]) -> list[Request]:
    params = SamplingParams(temperature=0.0)
    return [Request(f"r{i}", prompt, params, NUM_TOKENS) for i, prompt in enumerate(prompts)]


def test_alone(engine: Engine, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    [[[answer]]] = serve(engine, greedy(prompts[:1]))
    assert answer.token_ids == expected[0]


def test_in_chunks_with_strangers_then_from_a_warm_cache(
    engine: Engine, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    waves = serve(engine, [*greedy(prompts), *STRANGERS], greedy(prompts), max_num_batched_tokens=47)
    for answers in waves:
        assert [answer.token_ids for [answer] in answers[:2]] == expected
    assert all(answer.handle.num_cached_tokens >= len(prompts[i]) // 16 * 16 - 1 for i, [answer] in enumerate(waves[1]))


def test_after_forced_preemption(engine: Engine, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    [answers] = serve(
        engine, [*greedy(prompts), STRANGERS[0]], num_blocks=20, max_num_batched_tokens=64, forecast_admission=False
    )
    assert [answer.token_ids for [answer] in answers[:2]] == expected
    assert sum(answer.handle.num_preemptions for [answer] in answers) > 0
