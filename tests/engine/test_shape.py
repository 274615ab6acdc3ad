"""A model's size from its configuration, against what is really allocated and against published numbers."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import LoadError
from engine.models.families import spec_from_hf_config
from engine.models.load import read_spec
from engine.shape import WEIGHT_BITS, read_shape, shape_of
from engine.weights.checkpoint import ModelSource, resolve_model
from tests.fakes.tiny_models import make_tiny_model

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def test_llama_3_8b() -> None:
    shape = shape_of(spec_from_hf_config(LLAMA_3_8B), "llama")
    assert shape.num_parameters == 8_030_261_248
    assert shape.num_vocab_parameters == 2 * 128_256 * 4_096
    assert shape.weight_bytes("float16") == 16_060_522_496
    assert shape.weight_bytes("int8") == 8_030_261_248 * 17 // 16
    # 6,979,588,096 parameters in 5 bits, 1,050,673,152 in 8.5
    assert shape.weight_bytes("int4") == 4_362_242_560 + 1_116_340_224
    # the same in 4.25 bits
    assert shape.weight_bytes("int4_g128") == 3_707_906_176 + 1_116_340_224
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_context) == (32, 8, 128, 8192)


def test_smollm2_without_reading_its_weights() -> None:
    shape = read_shape(None)
    assert shape.num_parameters == 134_515_008
    assert shape.weight_bytes("bfloat16") == 269_030_016
    # 576 inputs are whole groups of 64: 106,203,456 parameters in 4.5 bits at most, 28,311,552 in 8.5
    assert shape.weight_bytes("int4_g128") == 59_739_444 + 30_081_024
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_context) == (30, 3, 64, 8192)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_parameters_are_what_is_allocated(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    shape = read_shape(str(folder))
    assert shape == shape_of(read_spec(ModelSource(folder, "safetensors", shape.name)), shape.name)
    config = EngineConfig(num_kv_blocks=4, quantization="none", dtype="float32")
    engine = Engine.load(resolve_model(str(folder)), config)
    # Packed matrices are padded to whole panels; norms are never larger than reckoned.
    reckoned = shape.weight_bytes("float32")
    assert reckoned <= engine.info.weight_bytes <= 1.35 * reckoned
    assert shape.num_parameters == _num_stored(folder)
    engine.close()


def _num_stored(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in names)


def test_every_kind_of_weights_is_smaller_than_the_one_before() -> None:
    shape = shape_of(spec_from_hf_config(LLAMA_3_8B), "llama")
    sizes = [shape.weight_bytes(kind) for kind in WEIGHT_BITS]
    assert sizes == sorted(sizes, reverse=True)


def test_a_model_that_is_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match="no such file or folder"):
        read_shape("nobody/nothing-at-all")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="JSON object"):
        read_shape(str(tmp_path))
