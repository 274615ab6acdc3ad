"""KV blocks through host memory and disk, with a real model: out of the pool, over a restart, back, and exact."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, BlockLoad
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import StepError
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from kvpool.disk import disk_tier
from kvpool.tier import BlockTier, HostTier, Tiers
from scheduler.offload import Backing
from scheduler.request import Request
from tests.fakes.naive_attention import naive_greedy
from tests.fakes.serving import MAX_NUM_SEQS, serve
from tests.fakes.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 12
PROMPTS = [tuple((a * i * i + 3 * i + a) % 250 for i in range(70)) for a in (3, 5, 7, 11, 13)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    source = resolve_model(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama"))))
    return load_decoder(source, torch.float32, torch.device("cpu"), lambda *_: None)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[int]]:
    return [naive_greedy(decoder, prompt, NUM_TOKENS) for prompt in PROMPTS]


def new_engine(decoder: Decoder, kv_cache_dtype: str = "auto") -> Engine:
    config = EngineConfig(num_kv_blocks=64, max_num_seqs=MAX_NUM_SEQS, kv_cache_dtype=kv_cache_dtype)
    return Engine.from_decoder(decoder, config)


def request(number: int) -> Request:
    return Request(f"r{number}", PROMPTS[number], GREEDY, NUM_TOKENS)


def make_disk(engine: Engine, folder: Path) -> BlockTier:
    return disk_tier(folder, bytes(32), engine.info.layout.bytes_per_block, 1 << 30)


MAKERS: dict[str, Callable[[Engine, Path], BlockTier]] = {
    "disk": make_disk,
    "host": lambda engine, folder: HostTier(1 << 30),
    "both": lambda engine, folder: Tiers(HostTier(1 << 30), make_disk(engine, folder)),
}


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_evicted_blocks_come_back_and_change_no_token(
    decoder: Decoder, expected: list[list[int]], tmp_path: Path, kind: str
) -> None:
    engine = new_engine(decoder)
    tier = MAKERS[kind](engine, tmp_path)
    waves = [[request(number)] for number in (0, 1, 2, 3, 4, 0, 2)]
    answers = serve(engine, *waves, num_blocks=9, backing=Backing(tier))
    engine.close()
    for [wave], [[answer]] in zip(waves, answers, strict=True):
        assert answer.token_ids == expected[PROMPTS.index(wave.prompt_ids)]
    assert [wave[0][0].handle.num_cached_tokens for wave in answers] == [0, 0, 0, 0, 0, 64, 64]


def test_a_new_engine_finds_the_blocks_of_the_one_before_it(
    decoder: Decoder, expected: list[list[int]], tmp_path: Path
) -> None:
    engine = new_engine(decoder)
    serve(engine, [request(0)], backing=Backing(make_disk(engine, tmp_path)))
    engine.close()
    engine = new_engine(decoder)
    [[[answer]], [[other]]] = serve(engine, [request(0)], [request(1)], backing=Backing(make_disk(engine, tmp_path)))
    engine.close()
    assert (answer.token_ids, answer.handle.num_cached_tokens) == (expected[0], 64)
    assert (other.token_ids, other.handle.num_cached_tokens) == (expected[1], 0)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_blocks_come_back_after_eviction_and_restart(
    decoder: Decoder, tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Codes and scales travel as they are: the tokens are those of a cold run of the same cache."""
    engine = new_engine(decoder, kv_cache_dtype)
    cold = [serve(engine, [request(number)])[0][0][0].token_ids for number in range(len(PROMPTS))]
    waves = [[request(number)] for number in (0, 1, 2, 3, 4, 0, 2)]
    answers = serve(engine, *waves, num_blocks=9, backing=Backing(make_disk(engine, tmp_path)))
    engine.close()
    assert [wave[0][0].token_ids for wave in answers] == [cold[number] for number in (0, 1, 2, 3, 4, 0, 2)]
    assert [wave[0][0].handle.num_cached_tokens for wave in answers] == [0, 0, 0, 0, 0, 64, 64]
    engine = new_engine(decoder, kv_cache_dtype)
    answers = serve(engine, *([request(number)] for number in (1, 4)), backing=Backing(make_disk(engine, tmp_path)))
    engine.close()
    assert [wave[0][0].token_ids for wave in answers] == [cold[1], cold[4]]
    assert [wave[0][0].handle.num_cached_tokens for wave in answers] == [64, 64]


def test_a_damaged_block_is_computed_again(decoder: Decoder, expected: list[list[int]], tmp_path: Path) -> None:
    engine = new_engine(decoder)
    serve(engine, [request(0)], backing=Backing(make_disk(engine, tmp_path)))
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        path.write_bytes(bytes(content))
    [[[answer]]] = serve(engine, [request(0)], backing=Backing(make_disk(engine, tmp_path)))
    engine.close()
    assert (answer.token_ids, answer.handle.num_cached_tokens) == (expected[0], 0)


def test_a_load_of_another_size_fails_its_step_alone(decoder: Decoder) -> None:
    engine = new_engine(decoder)
    with pytest.raises(StepError, match="cannot be filled"):
        engine.step_sync(Batch(1, (), (), (), loads=(BlockLoad(3, b"short"),)))
    [saved] = engine.step_sync(Batch(2, (), (), (), saves=(3,))).saved
    assert len(saved) == engine.info.layout.bytes_per_block
    engine.close()
