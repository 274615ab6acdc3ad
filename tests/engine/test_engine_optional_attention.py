"""The whole engine over the optional attention libraries' stand-ins: their steps through the real scheduler."""

import sys

import pytest
import torch

from engine.attention import optional
from engine.attention.flashinfer_paged import WORKSPACE_BYTES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu import decode_graphs, graph_bytes
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from scheduler.request import Request
from tests.fakes.attention_libraries import fake_flash_attn, fake_flashinfer
from tests.fakes.serving import MAX_NUM_SEQS, serve
from tests.fakes.tiny_models import make_tiny_model

LIBRARIES = ["flashinfer", "flash-attn"]
PROMPT_LENGTHS = (5, 250, 300, 17, 256)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A window on every layer, and heads of a size that both libraries take; computed in its dtype, as on a GPU."""
    folder = make_tiny_model("mistral", tmp_path_factory.mktemp("mistral"), head_dim=64, sliding_window=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_NATIVE", "0")
        return load_decoder(resolve_model(str(folder)), torch.float16, torch.device("cpu"), lambda *_: None)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    monkeypatch.setattr(optional, "capability_of", lambda device: (9, 0))


def tokens(decoder: Decoder, attention_backend: str) -> list[list[int]]:
    """Greedy tokens of requests whose prompts come in chunks, while others decode."""
    config = EngineConfig(
        device="cpu",
        block_size=256,
        num_kv_blocks=12,
        max_num_seqs=MAX_NUM_SEQS,
        attention_backend=attention_backend,
    )
    engine = Engine.from_decoder(decoder, config)
    requests = [
        Request(
            f"r{i}",
            tuple(7 + (13 * i + j * j) % 200 for j in range(length)),
            SamplingParams(temperature=0.0),
            NUM_TOKENS,
        )
        for i, length in enumerate(PROMPT_LENGTHS)
    ]
    [answers] = serve(engine, requests, max_num_batched_tokens=96)
    engine.close()
    assert engine.info.attention_backend == attention_backend
    return [choice.token_ids for [choice] in answers]


@pytest.mark.parametrize("name", LIBRARIES)
def test_served_tokens_are_the_references(decoder: Decoder, name: str) -> None:
    assert tokens(decoder, name) == tokens(decoder, "reference")


def test_what_a_backend_keeps_on_the_device_is_accounted_for(decoder: Decoder) -> None:
    kept = {name: graph_bytes(decoder, EngineConfig(attention_backend=name), 512) for name in (*LIBRARIES, "torch")}
    assert kept == {"flashinfer": WORKSPACE_BYTES, "flash-attn": 0, "torch": 0}


@pytest.mark.parametrize("name", LIBRARIES)
def test_their_decode_steps_run_eagerly(decoder: Decoder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", block_size=256, num_kv_blocks=12, attention_backend=name)
    engine = Engine.from_decoder(decoder, config)
    engine.close()
    monkeypatch.setattr("engine.gpu._records", lambda config, device: True)
    assert decode_graphs(decoder, engine._runner._parts.attention, config, 512) is None
