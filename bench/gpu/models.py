"""Models that exist only as shapes: random weights, on the device, without any file."""

import math
from typing import Any

import torch

from engine.models.allocate import empty_decoder
from engine.models.decoder import Decoder
from engine.models.families import spec_from_hf_config
from engine.models.parameters import DenseParameters
from engine.models.spec import DecoderSpec, RopeSpec


def llama_8b() -> DecoderSpec:
    """The shape of Llama 3.1 8B."""
    return _spec(num_layers=32, hidden=4096, heads=(32, 8), head_dim=128, intermediate=14_336, vocab=128_256)


def tiny_llama() -> DecoderSpec:
    """The same kind, small enough for any machine."""
    return _spec(num_layers=2, hidden=64, heads=(4, 2), head_dim=16, intermediate=96, vocab=512)


def _spec(
    num_layers: int, hidden: int, heads: tuple[int, int], head_dim: int, intermediate: int, vocab: int
) -> DecoderSpec:
    return DecoderSpec(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeSpec(theta=500_000.0),
        sliding_window=(None,) * num_layers,
    )


def random_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Weights of a scale that keeps activations finite through all layers."""
    parameters = DenseParameters(dtype, device)
    decoder = empty_decoder(spec, parameters, spec.default_context)
    generator = torch.Generator(device).manual_seed(0)
    for place in parameters.places.values():
        if len(place.shape) == 1:
            place.tensor.fill_(1.0)
        else:
            place.tensor.normal_(0.0, 1.0 / math.sqrt(place.shape[1]), generator=generator)
    return decoder


def qwen3_config(tiny: bool) -> Any:
    """transformers' configuration of Qwen3 0.6B, or of something far smaller with the same parts."""
    from transformers import Qwen3Config

    shape = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    own = {**small, **heads} if tiny else shape
    return Qwen3Config(**own, tie_word_embeddings=True, rope_theta=1_000_000.0, eos_token_id=None, bos_token_id=None)


def random_hf_model(config: Any, dtype: torch.dtype, device: torch.device, attention: str = "eager") -> Any:
    """A transformers model with random weights, wide enough that greedy tokens differ from one to the next."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[1]))
    return model


def decoder_of(model: Any) -> Decoder:
    """The same weights, copied into this project's decoder."""
    parameters = DenseParameters(model.dtype, model.device)
    spec = spec_from_hf_config(model.config.to_dict())
    decoder = empty_decoder(spec, parameters, spec.default_context)
    weights = model.state_dict()
    for name, place in parameters.places.items():
        place.tensor.copy_(weights[name])
    return decoder
