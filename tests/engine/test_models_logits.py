"""The decoder against transformers: logits of every family, with every switch, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import no_progress
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.weights.checkpoint import resolve_model
from tests.fakes.naive_attention import naive_greedy, naive_logits
from tests.fakes.tiny_models import FAMILIES, load_reference, make_tiny_model

CPU = torch.device("cpu")
TOLERANCE = 5e-5
PROMPT = [(7 * index * index + 3) % 288 for index in range(60)]


def load(path: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None) -> Decoder:
    return load_decoder(resolve_model(str(path)), dtype, CPU, no_progress, max_model_len)


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return load_reference(folder)(torch.tensor([token_ids])).logits[0]


def check_logits(folder: Path, token_ids: list[int], max_model_len: int | None = None) -> None:
    expected = reference_logits(folder, token_ids)
    assert expected.std() > 0.3, "the model is too tame to tell right from wrong"
    actual = naive_logits(load(folder, max_model_len=max_model_len), token_ids)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head_dim": ("llama", {"head_dim": 8}),
    "llama, other eps and theta": (
        "llama",
        {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2, windows from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, biases and tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    check_logits(make_tiny_model(family, tmp_path, **overrides), PROMPT)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn, given attention": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.4,
        "truncate": False,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_with_a_scaled_rope_equal_transformers(scaling: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10_000.0, **SCALINGS[scaling]}
    check_logits(make_tiny_model("llama", tmp_path, rope_parameters=rope), PROMPT)


@pytest.mark.parametrize(("length", "max_model_len"), [(60, 64), (64, 64), (100, 100), (128, 128)])
def test_dynamic_scaling_equals_transformers_where_that_is_defined(
    length: int, max_model_len: int, tmp_path: Path
) -> None:
    """Up to the trained length for every sequence; beyond it for a sequence as long as the served maximum."""
    rope = {"rope_theta": 10_000.0, **SCALINGS["dynamic"]}
    folder = make_tiny_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    check_logits(folder, [(11 * index + 5) % 288 for index in range(length)], max_model_len)


def test_a_ragged_batch_equals_its_sequences_alone(tmp_path: Path) -> None:
    decoder = load(make_tiny_model("mistral", tmp_path))
    sequences = [PROMPT[:23], PROMPT[30:31], PROMPT[5:58]]
    alone = torch.cat([naive_logits(decoder, sequence) for sequence in sequences])
    torch.testing.assert_close(naive_logits(decoder, *sequences), alone, atol=TOLERANCE, rtol=0)


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    single = make_tiny_model("qwen3", tmp_path / "single")
    sharded = make_tiny_model("qwen3", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(naive_logits(load(single), PROMPT), naive_logits(load(sharded), PROMPT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_half_precision_stays_near_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, dtype=torch.bfloat16)
    exact, rounded = load(folder), load(folder, dtype)
    num_weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert rounded.weight_bytes == pytest.approx(2 * num_weights, rel=0.01)  # a kernel keeps vectors in float32
    logits = naive_logits(rounded, PROMPT)
    assert logits.dtype == torch.float32
    error = (logits - naive_logits(exact, PROMPT)).norm() / logits.norm()
    assert error < 0.05


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen2", tmp_path, num_hidden_layers=3)
    output = load_reference(folder).generate(
        torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
    )
    assert naive_greedy(load(folder), PROMPT, 64) == output[0, len(PROMPT) :].tolist()
