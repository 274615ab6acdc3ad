"""Configurations to specifications: every family, every refusal by name, and rotary formulas against transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import LoadError
from engine.models.families import spec_from_gguf, spec_from_hf_config
from engine.models.rope import rope_frequencies, rotary_embedding
from engine.models.rope_config import rope_from_hf_config
from engine.models.spec import DecoderSpec, RopeSpec
from engine.weights.gguf_header import GGUFHeader, GGUFTensorInfo

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def hf(**changes: Any) -> DecoderSpec:
    config = {**LLAMA, **changes}
    if "architectures" not in changes and changes.get("model_type"):
        del config["architectures"]
    return spec_from_hf_config(config)


def test_defaults_of_a_sparse_llama_config() -> None:
    spec = hf()
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (4, 16, 1e-6)
    assert (spec.query_size, spec.kv_size) == (64, 64)
    assert spec.rope == RopeSpec("default", 10_000.0)
    assert spec.sliding_window == (None, None, None)
    assert not any((spec.tie_word_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm))


def test_llama_biases() -> None:
    spec = hf(attention_bias=True)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, False)


def test_qwen_switches() -> None:
    qwen2 = hf(model_type="qwen2", num_key_value_heads=2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = hf(model_type="qwen3", num_key_value_heads=2, head_dim=None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    assert hf(model_type="qwen3", num_key_value_heads=2).head_dim == 128


def test_sliding_windows() -> None:
    mistral = {"model_type": "mistral", "num_key_value_heads": 2}
    assert hf(**mistral).sliding_window == (4096,) * 3
    assert hf(**mistral, sliding_window=None).sliding_window == (None,) * 3
    assert hf(**mistral, sliding_window=9).sliding_window == (9,) * 3
    qwen = {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 8, "max_window_layers": 2}
    assert hf(**qwen).sliding_window == (None,) * 3
    assert hf(**qwen, use_sliding_window=True).sliding_window == (None, None, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert hf(**qwen, use_sliding_window=True, layer_types=kinds).sliding_window == (8, None, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported"),
        ({"model_type": None, "architectures": None}, "model type None"),
        ({"model_type": "qwen2_moe"}, "'qwen2_moe'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1.0}}, "partial rotary embedding"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ({"layer_types": ["full_attention"] * 2}, "2 sliding windows for 3 layers"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 on, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 on, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"num_attention_heads": 128}, "head_dim must be"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number, got 'tiny'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layer types"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "must be below high_freq_factor",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError) as caught:
        hf(**changes)
    assert said in str(caught.value)


def test_the_context_that_a_scaling_is_meant_for() -> None:
    def contexts(**rope: Any) -> tuple[int, int]:
        spec = hf(rope_scaling=rope)
        return spec.default_context, spec.max_context

    assert contexts(rope_type="default") == (256, 256)
    assert contexts(rope_type="linear", factor=4.0) == (1024, 1024)
    assert contexts(rope_type="dynamic", factor=4.0) == (256, 1024)
    assert contexts(rope_type="yarn", factor=4.0) == (1024, 1024)
    assert contexts(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == (256, 256)
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    assert contexts(rope_type="llama3", factor=8.0, **bands) == (256, 256)


# --- rotary formulas


FACTORS = st.floats(1.0, 64.0)
LENGTHS = st.sampled_from([32, 100, 256])
SCALINGS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": FACTORS}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": FACTORS,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(3.0, 8.0),
            "original_max_position_embeddings": LENGTHS,
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": FACTORS, "original_max_position_embeddings": LENGTHS},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "beta_fast": st.integers(8, 64),
            "beta_slow": st.integers(1, 4),
            "truncate": st.booleans(),
        },
    ),
)


@settings(deadline=None, max_examples=200)
@given(SCALINGS, st.sampled_from([8, 16, 64, 128]), st.sampled_from([1e4, 5e5]), st.sampled_from([200, 256, 1000]))
def test_frequencies_equal_transformers(scaling: dict[str, Any], head_dim: int, theta: float, context: int) -> None:
    rope = {"rope_theta": theta, **scaling}
    config = LlamaConfig(max_position_embeddings=256, head_dim=head_dim, rope_parameters=dict(rope))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=context)
    spec = rope_from_hf_config({"max_position_embeddings": 256, "rope_parameters": rope})
    torch.testing.assert_close(rope_frequencies(spec, head_dim, context), expected, rtol=2e-6, atol=0)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-9)


def test_old_and_new_spellings_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = hf(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert old.rope.theta == 5e5
    assert hf(rope_theta=7.0, rope_scaling=None).rope.theta == 7.0


def test_a_rotation_depends_on_the_distance_alone() -> None:
    rope = rotary_embedding(RopeSpec(theta=100.0), 16, 64, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    products = [
        (rope(torch.tensor([p + 5]), torch.float32)(query) * rope(torch.tensor([p]), torch.float32)(key)).sum()
        for p in (0, 1, 40)
    ]
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2])
    unturned = rope(torch.tensor([0]), torch.float32)(query)
    assert torch.equal(unturned, query)


# --- GGUF metadata


def gguf_header(tmp_path: Any, architecture: str = "llama", **changes: Any) -> GGUFHeader:
    values = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "context_length": 128,
        **changes,
    }
    metadata = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    info = GGUFTensorInfo((100, 64), 0, tmp_path / "m.gguf", 0)
    return GGUFHeader({"general.architecture": architecture, **metadata}, {"token_embd.weight": info})


def test_a_sparse_gguf(tmp_path: Any) -> None:
    spec = spec_from_gguf(gguf_header(tmp_path))
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 16, 100)
    assert spec.tie_word_embeddings
    assert spec.rope == RopeSpec()


def test_gguf_yarn_attention_factor_is_multiplied(tmp_path: Any) -> None:
    changes = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.attn_factor": 2.0,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    rope = spec_from_gguf(gguf_header(tmp_path, **changes)).rope
    assert rope.attention_factor == pytest.approx(2 * (0.1 * 1.3862943611 + 1))
    assert (rope.original_context, rope.beta_fast, rope.beta_slow) == (128, 16.0, 1.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("gemma3", {}, "GGUF architecture 'gemma3' is not supported"),
        ("llama", {"expert_count": 8}, "mixture of experts (8 experts)"),
        ("llama", {"attention.head_count": [4, 4]}, "attention.head_count must be a whole number"),
        ("llama", {"attention.key_length": 16, "attention.value_length": 8}, "different head sizes"),
        ("llama", {"rope.dimension_count": 8}, "partial rotary embedding (0.5 of each head)"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' is not supported"),
        ("qwen2", {"block_count": None}, "block_count is missing"),
    ],
)
def test_what_a_gguf_asks_for_in_vain_is_named(
    architecture: str, changes: dict[str, Any], said: str, tmp_path: Any
) -> None:
    with pytest.raises(LoadError) as caught:
        spec_from_gguf(gguf_header(tmp_path, architecture, **changes))
    assert said in str(caught.value)
